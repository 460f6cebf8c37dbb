"""Drives a staged engine step by step and keeps the ledger in step with what vLLM decides.

Around every production step the harness

1. reads the block tables the scheduler just made, poisons newly allocated blocks, and notes what must be loaded;
2. plays the kernels: before a layer reads its cache it judges what stands there, then writes the new tokens' code;
3. judges all of memory when the engine is idle, and a block before it is handed out again.

It never asks the connector anything: its lookups and accesses are recorded as claims.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from blake3 import blake3  # what vLLM itself requires, and several times faster than hashlib

from kvproof.bytecode import ByteCode, Contents, Fill, Ledger, Mismatch
from kvproof.bytecode.code import optional
from kvproof.engine import coded_model
from kvproof.engine.claims import Access, AddressMap, CopyRecorder, TorchRecorder, watch_threads
from kvproof.engine.connectors import Profile
from kvproof.engine.sequences import common_prefix, scattered
from kvproof.engine.staging import Staged
from kvproof.layout import Group, Resource
from kvproof.oracles import transcript as t
from kvproof.platforms import device_memory
from kvproof.platforms.hostcopy import HOST_COPIER
from kvproof.platforms.native_copies import NativeCopies

STORE_SECONDS = 10
"""How long a store that lags behind its requests is waited for."""
MAX_STEPS = 400
"""Steps that compute, in one run of requests; more means that the engine goes round in circles."""
IDLE_SECONDS = 10.0
"""How long the engine may wait for a connector with nothing to compute."""
YIELD_SECONDS = 0.001
"""What vLLM's own loop leaves other threads after a step that computed nothing."""


@dataclass
class Tracked:
    """A request as the harness follows it. Token counts as vLLM states them."""

    label: str
    request_id: str
    prompt: list[int]
    local: int = 0
    external: int = 0
    claimed: int | None = None
    asynchronous: bool = False
    stored: int = 0
    expected: int | None = None
    admitted: bool = False
    loaded: bool = False  # its first computing step has begun
    tables: list[list[int]] = field(default_factory=list)
    owned: set[int] = field(default_factory=set)  # blocks it has or had: a state moves on to another one
    contents: np.ndarray[Any, Any] = field(default_factory=lambda: np.empty(0, np.int32))


@dataclass(frozen=True)
class Work:
    """One request's share of a step: tokens [computed, computed + count) are computed.

    ``kept``: tokens whose cached KV the step leaves alone. More than ``computed`` where vLLM replays the last window of
    a hit for groups that are not cached.
    """

    tracked: Tracked
    computed: int
    count: int
    first: bool
    kept: int


class StuckError(RuntimeError):
    """The engine computed without an end, or waited for a connector that never answered."""


class Harness:
    """One staged engine under observation. Create once, run many scenarios."""

    def __init__(self, staged: Staged, seed: int, profile: Profile | None) -> None:
        self.staged = staged
        self.layout = staged.memory.layout
        self.groups: dict[int, Group] = {g.id: g for g in self.layout.groups}
        self.memory = staged.memory.bytes
        self.ledger = Ledger(self.layout, ByteCode(seed), self.memory.arrays)
        self.contents = Contents()
        self.transcript = t.Transcript()
        self.rng = np.random.default_rng(seed)
        self.scenario = ""
        self.step_number = 0
        self.tracked: dict[str, Tracked] = {}
        self.finished: list[Tracked] = []
        self._pinned: set[int] = set()  # blocks in use in the last step that vLLM scheduled
        self._lingering: set[int] = set()  # blocks in use in the last step that computed, until the next one computes
        self._executed = False
        self._profile = profile
        self._prompts: list[list[int]] = []
        self._work: list[Work] = []
        self._new: list[tuple[int, int, Fill, bool]] = []  # handed out, not poisoned: group, block, fill, loads allowed
        self._to_zero: list[int] = []
        self._digests: dict[tuple[int, int], bytes] = {}
        self._layer_resources: dict[str, list[Resource]] = {}
        for r in self.layout.resources:
            self._layer_resources.setdefault(r.layer, []).append(r)
        # Tokens at the end of a hit that vLLM computes again for groups that are not cached; 0 before vLLM 0.33.
        self._replayed = int(getattr(staged.core.scheduler, "prefix_replay_tokens", 0))
        self._mamba_mode = staged.core.vllm_config.cache_config.mamba_cache_mode
        self._native: NativeCopies | None = None
        self._store_lags = False
        self._late = False  # what is being reported was done some time ago
        self._serial = 0
        self._paint()
        self._observe()
        self.scramble()

    def _paint(self) -> None:
        self.ledger.paint()
        self.memory.push()

    # ------------------------------------------------------------------ wiring

    def _observe(self) -> None:
        coded_model.observe(self)
        scheduler = self.staged.core.scheduler
        schedule = scheduler.schedule

        def observed_schedule(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._after_schedule(output)
            return output

        scheduler.schedule = observed_schedule
        connector = scheduler.connector
        if connector is None:
            return
        lookup, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

        def observed_lookup(request: Any, num_computed_tokens: int) -> Any:
            answer = lookup(request, num_computed_tokens)
            mine = self.tracked[request.request_id]
            mine.local = num_computed_tokens
            mine.claimed, mine.asynchronous = answer[0], bool(answer[1])
            return answer

        def observed_alloc(request: Any, blocks: Any, num_external_tokens: int) -> None:
            mine = self.tracked[request.request_id]
            if not mine.admitted:
                mine.external = num_external_tokens
            allocated(request, blocks, num_external_tokens)

        connector.get_num_new_matched_tokens = observed_lookup
        connector.update_state_after_alloc = observed_alloc
        addresses = AddressMap(self.layout, self.staged.memory.addresses)
        self._recorder = CopyRecorder(addresses, self._claim)
        HOST_COPIER.taps.append(self._recorder)
        self._native = self.staged.platform.native_copies()
        if self._native is not None:
            for base, nbytes in zip(addresses.bases, addresses.sizes, strict=True):
                self._native.declare(base, nbytes)
        self._watch_worker(addresses)

    def _watch_worker(self, addresses: AddressMap) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker = get_kv_transfer_group()
        watch_threads(lambda: TorchRecorder(addresses, self._claim))
        hooks = ("handle_preemptions", "start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save")
        for hook in hooks:
            production = getattr(worker, hook)

            def observed(*args: Any, _production: Any = production, _hook: str = hook, **kwargs: Any) -> Any:
                if _hook != "handle_preemptions":
                    self._poison()
                with TorchRecorder(addresses, self._claim):
                    answer = _production(*args, **kwargs)
                self._collect_native()
                self._poison()
                return answer

            setattr(worker, hook, observed)

    def _collect_native(self) -> None:
        """Report what compiled code copied since the last time, while vLLM's tables are those it was asked under."""
        if self._native is not None:
            batch = self._native.collect()
            if len(batch.sizes):
                self._late = True
                try:
                    self._recorder(batch)
                finally:
                    self._late = False

    def _claim(self, access: Access) -> None:
        allowed = self._loadable() if access.write else self._savable()
        self.transcript.claims.append(
            t.Claim(
                self.scenario, self.step_number, "load" if access.write else "save", access.via, access.addresses,
                access.nbytes, tuple(sorted(access.blocks)), tuple(sorted(allowed)), access.outside, access.crossing,
                access.first_illegal, access.starts,
            )
        )  # fmt: skip

    def _loadable(self) -> set[int]:
        """Blocks a load may write: those of requests with an external hit that have not begun to compute.

        Of a state also the block it will go on in: a connector may put the state there as well as where it was.
        """
        blocks: set[int] = set()
        rewrites_local = self._profile is not None and self._profile.rewrites_local
        for request in self.tracked.values():
            if request.external and not request.loaded:
                for group, table in enumerate(request.tables):
                    size = self.groups[group].block_size
                    state = self.groups[group].rule == "state"
                    first = 0 if state or rewrites_local else request.local // size
                    last = len(table) if state else -(-(request.local + request.external) // size)
                    blocks |= set(table[first:last])
        return blocks - {0}

    def _savable(self) -> set[int]:
        """Blocks a save may read: those in use, and those just given back until the next kernel may write into them.

        In use is what vLLM counts a reference for: a request's or a connector's. Copies of compiled code are reported
        later than they were made, so for them it is whatever a request of this scenario ever had.
        """
        if self._late:
            return set().union(self._pinned, *(r.owned for r in (*self.tracked.values(), *self.finished))) - {0}
        return (self._pinned | self._lingering) - {0}

    def _in_use(self) -> set[int]:
        pool = self.staged.core.scheduler.kv_cache_manager.block_pool
        return {block.block_id for block in pool.blocks if block.ref_cnt > 0}

    # ------------------------------------------------------------------ driving

    def begin(self, scenario: str) -> None:
        """Start a scenario: earlier requests are forgotten, what is stored stays stored."""
        self.scenario = scenario
        self.finished.clear()

    def start_over(self) -> None:
        """Forget everything seen on this engine: memory is nobody's, no prompt is known, the transcript is new."""
        self._paint()
        for known in (self.tracked, self.finished, self._prompts, self._digests, self._work, self._new):
            known.clear()
        self.transcript = t.Transcript()

    def submit(self, label: str, prompt: Sequence[int], output_tokens: int = 1) -> Tracked:
        """Add a request to the production scheduler. ``prompt`` are token ids."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        self._wait_for_store()
        self._serial += 1
        request_id = f"{self.scenario}/{label}#{self._serial}"
        tracked = Tracked(label, request_id, list(prompt))
        core = self.staged.core
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        if self._profile is not None:
            tracked.expected = self._shortest_legal_hit(
                self._profile.hit_rule(tracked.prompt, self._prompts, self.staged.hit_unit)
            )
        tracked.contents = self.contents.intern(request_id, tracked.prompt)
        tracked.tables = [[] for _ in self.layout.groups]
        self.tracked[request_id] = tracked
        core.add_request(*core.preprocess_add_request(request))
        return tracked

    def _wait_for_store(self) -> None:
        """Where saves end after their requests: wait until what was computed can be found, or give that up for good."""
        if self._profile is None or self._profile.has_stored is None or self._store_lags:
            return
        unit, config = self.staged.hit_unit, self.staged.core.vllm_config.kv_transfer_config
        blocks = {tuple(p[:end]) for p in self._prompts for end in range(unit, len(p) + 1, unit)}
        deadline = time.monotonic() + STORE_SECONDS
        while not self._profile.has_stored(config.kv_connector_extra_config, len(blocks)):
            if time.monotonic() > deadline:
                self._store_lags = True
                return
            time.sleep(0.01)

    def _shortest_legal_hit(self, hit: int) -> int | None:
        """The declared hit, less what vLLM's own policy for window and state groups may cost.

        The blocks of a window are kept for hits that a prompt can have itself, so one that ends exactly at its last
        block may miss; states exist only where vLLM made a checkpoint, so nothing is promised for them.
        """
        rules = {g.rule for g in self.groups.values()}
        if "state" in rules:
            return None
        if hit <= self._replayed:
            return 0
        return max(0, hit - self.staged.hit_unit) if "window" in rules else hit

    def _computed_before(self, mine: Tracked) -> int:
        """Tokens of this prompt that were computed before or are being computed in this very step."""
        alive = self.staged.core.scheduler.requests
        known = list(self._prompts)
        for other in self.tracked.values():
            if other is not mine and other.request_id in alive:
                known.append(other.prompt[: alive[other.request_id].num_computed_tokens])
        return max((common_prefix(k, mine.prompt) for k in known), default=0)

    def run(self, settle: bool = True) -> int:
        """Step until the scheduler has nothing left; the number of steps taken.

        Without ``settle`` only until every request has its tokens: the next step computes the next request and tells
        the workers about the last ones, as under load. Otherwise vLLM makes a step of its own for that.
        """
        scheduler = self.staged.core.scheduler
        busy = scheduler.has_requests if settle else scheduler.has_unfinished_requests
        steps = computed = 0
        deadline = time.monotonic() + IDLE_SECONDS
        while busy():
            self.step()
            steps += 1
            if self._executed:
                computed += 1
                deadline = time.monotonic() + IDLE_SECONDS
            else:
                self._yield(deadline)
            if computed > MAX_STEPS:
                raise StuckError(f"scenario {self.scenario}: {computed} steps computed, limit {MAX_STEPS}")
        return steps

    def _yield(self, deadline: float) -> None:
        """Leave a connector's threads the processor; StuckError past ``deadline`` (of the monotonic clock)."""
        if time.monotonic() > deadline:
            requests = self.staged.core.scheduler.requests
            waits = [f"{name} ({_waits_for(request)})" for name, request in requests.items()]
            raise StuckError(
                f"nothing to compute for {IDLE_SECONDS:.0f} s, waiting for: {', '.join(waits) or 'blocks still held'}"
            )
        time.sleep(YIELD_SECONDS)

    def step(self) -> None:
        """One production step; all of memory is judged when it leaves the engine idle.

        Nothing but a connector writes behind the model's back, and what it wrote stays until the model computes that
        row or the block is handed out again. Both are judged first, so nothing is lost by waiting for the idle engine.
        """
        core = self.staged.core
        self.step_number += 1
        self._work = []
        _, self._executed = core.step_fn()
        core.post_step(self._executed)
        self._collect_native()
        self._poison()
        if self._executed:
            self._lingering = self._pinned
        for work in self._work:
            work.tracked.loaded = True
        if not core.scheduler.has_requests():
            self._judge("at_rest")
        self._retire()

    def abandon(self) -> None:
        """The engine stopped: judge what it left, keep what was admitted and never finished; it may explain why."""
        self._judge("at_rest")
        for request in self.tracked.values():
            if request.admitted:
                self._record_load(request)

    def reset(self) -> None:
        """Production prefix-cache reset, then hand free blocks out in a new order, the last ones used at the end.
        StuckError where blocks are held for ever."""
        deadline = time.monotonic() + IDLE_SECONDS
        while not self.staged.core.reset_prefix_cache():
            self.step()
            self._yield(deadline)
        self.scramble()

    def scramble(self, again: bool = False) -> None:
        """Reorder the pool's free blocks: scattered, no two neighbours in a row where possible, those that finished
        requests had at the end. With ``again`` these come first, from the last group's to the first's: what one group
        stored is handed to another."""
        from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

        pool = self.staged.core.scheduler.kv_cache_manager.block_pool
        blocks = {b.block_id: b for b in pool.free_block_queue.get_all_free_blocks()}
        had = [b for r in self.finished for table in reversed(r.tables) for b in reversed(table)]
        old = list(dict.fromkeys(b for b in had if b in blocks))
        fresh = scattered(sorted(set(blocks) - set(old)), self.rng)
        order = old + fresh if again else fresh + scattered(sorted(old), self.rng)
        pool.free_block_queue = FreeKVCacheBlockQueue([blocks[b] for b in order])

    def _retire(self) -> None:
        alive = self.staged.core.scheduler.requests
        for request_id in [r for r in self.tracked if r not in alive]:
            gone = self.tracked.pop(request_id)
            self.finished.append(gone)
            self._prompts.append(gone.prompt)
            self._record_load(gone)

    def _record_load(self, r: Tracked) -> None:
        self.transcript.loads.append(
            t.Load(
                self.scenario, r.request_id, len(r.prompt), r.local, r.external, r.claimed, r.asynchronous, r.stored,
                r.expected,
            )
        )  # fmt: skip

    # ------------------------------------------------------------------ scheduler side

    def _after_schedule(self, output: Any) -> None:
        scheduler = self.staged.core.scheduler
        self._pinned = self._in_use()
        computed = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        for request_id in [r for r, tokens in computed.items() if not tokens]:
            self._begins_at_zero(self.tracked[request_id])
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, tracked in self.tracked.items():
            if request_id not in scheduler.requests:
                continue
            tables = scheduler.kv_cache_manager.get_block_ids(request_id)
            if any(tables):
                self._bind(tracked, [list(table) for table in tables])
        self._to_zero = list(output.new_block_ids_to_zero or [])
        self._work = [
            Work(self.tracked[r], computed[r], n, not self.tracked[r].loaded, self._kept(self.tracked[r], computed[r]))
            for r, n in output.num_scheduled_tokens.items()
        ]
        for work in self._work:
            request = scheduler.requests[work.tracked.request_id]
            tokens = list(request.all_token_ids)
            if len(tokens) > len(work.tracked.contents):
                work.tracked.contents = self.contents.intern(work.tracked.request_id, tokens)
        self.transcript.records.append(
            {
                "step": self.step_number,
                "scenario": self.scenario,
                "requests": [
                    {
                        "request": w.tracked.request_id,
                        "computed": w.computed,
                        "scheduled": w.count,
                        "local": w.tracked.local,
                        "external": w.tracked.external,
                        "tables": w.tracked.tables,
                    }
                    for w in self._work
                ],
                "waiting_for_load": [
                    {"request": r.request_id, "external": r.external, "tables": r.tables}
                    for r in self.tracked.values()
                    if r.admitted and not r.loaded and r not in [w.tracked for w in self._work]
                ],
                "zeroed": list(output.new_block_ids_to_zero or []),
                "finished": sorted(output.finished_req_ids),
            }
        )

    def _begins_at_zero(self, tracked: Tracked) -> None:
        """Whatever the lookups found, the request computes everything: vLLM drops a hit it would replay as a whole."""
        if 0 < tracked.local + (tracked.claimed or 0) <= self._replayed:
            tracked.local, tracked.claimed = 0, 0

    def _kept(self, tracked: Tracked, computed: int) -> int:
        """Tokens of ``tracked`` whose cached KV this step only reads."""
        replays = getattr(self.staged.core.scheduler.requests[tracked.request_id], "replay_start", 0) > 0
        return max(computed, tracked.local + tracked.external) if replays else computed

    def _bind(self, tracked: Tracked, tables: list[list[int]]) -> None:
        for group, table in enumerate(tables):
            size = self.groups[group].block_size
            fresh = [(i, b) for i, b in enumerate(table) if self._is_new(tracked, group, i, b)]
            # What somebody wrote into a block must be seen before the poison covers it.
            self._judge("at_rest", [block for _, block in fresh])
            for index, block in fresh:
                restored = self.groups[group].rule != "recomputed"
                loading = restored and not tracked.loaded and tracked.external > 0
                in_load = loading and index * size < tracked.local + tracked.external
                # A load may be under way from now on, production copies states between blocks itself, and what a
                # connector brings back of a group that is recomputed is written over before it is read.
                anything = in_load or self.groups[group].rule == "state" or (not restored and tracked.external > 0)
                self._new.append((group, block, Fill.TARGET if in_load else Fill.UNCOMPUTED, anything))
        tracked.tables = tables
        tracked.owned.update(*tables)
        if not tracked.admitted:
            tracked.admitted = True
            tracked.stored = self._computed_before(tracked)

    def _poison(self) -> None:
        """Poison the blocks that were handed out in this step.

        Not before the connector was told what is given away (``handle_preemptions``): until then the old bytes are
        there, and a store that is still owed may read them.
        """
        for group, block, fill, anything in self._new:
            self.ledger.allocate(group, [block], fill)
            self.memory.push(device_memory.frames(self.ledger.families, [block]))
            for r in self.layout.group_resources(group) if anything else ():
                self.ledger.mark(r, block, Fill.ANY)
        self._zeroed(self._to_zero)
        self._new, self._to_zero = [], []

    def _is_new(self, tracked: Tracked, group: int, index: int, block: int) -> bool:
        """Whether this place of the table got a block that neither was there before nor came from the local cache."""
        known = tracked.tables[group]
        if block == 0 or (index < len(known) and known[index] == block):
            return False
        return tracked.admitted or not self._is_local_hit(tracked, group, index)

    def _is_local_hit(self, tracked: Tracked, group: int, index: int) -> bool:
        """Whether this block came out of the local prefix cache."""
        size = self.groups[group].block_size
        if self.groups[group].rule == "recomputed":
            return False
        if self.groups[group].rule == "state":
            return tracked.local > 0 and (index + 1) * size == tracked.local
        return (index + 1) * size <= tracked.local

    def _zeroed(self, blocks: Sequence[int]) -> None:
        self.ledger.zeroed_padding |= bool(blocks)
        for block in blocks:
            owner = int(self.ledger.owner[block])
            for r in self.layout.group_resources(owner) if owner >= 0 else ():
                rows = self.ledger.rows[r.id][block]
                rows[(rows == Fill.TARGET) | (rows == Fill.UNCOMPUTED)] = Fill.ZEROED_OR_POISON

    # ------------------------------------------------------------------ the kernels' part

    def begin_forward(self) -> None:
        """Loads of this step were started and nothing is computed: what changed outside their targets is stray."""
        self._poison()
        self._lingering = set()
        if any(w.first and w.tracked.external and not w.tracked.asynchronous for w in self._work):
            self._judge("after_load")

    def attend(self, layer: str) -> None:
        """A layer is about to read: judge all its kernel sees of requests that begin, and the state of running ones."""
        for r in self._layer_resources.get(layer, ()):
            for work in self._work:
                if work.first and work.computed:
                    self._read(r, work)
                elif work.computed and self.groups[r.group].rule == "state":
                    self._read_running_state(r, work)

    def update_cache(self, layer: str) -> None:
        """A layer writes the new tokens of every scheduled request."""
        for r in self._layer_resources.get(layer, ()):
            for work in self._work:
                self._write(r, work)

    def _read(self, r: Resource, work: Work) -> None:
        tracked, group = work.tracked, self.groups[r.group]
        if group.rule == "recomputed":
            return  # nothing is loaded or cached here: what stands in its blocks is judged like any other memory
        hit_end = tracked.local + tracked.external
        wanted = self._rows(r, tracked, self._required_from(group, work.computed), min(work.kept, hit_end))
        loaded = self._rows(r, tracked, tracked.local, hit_end) if tracked.external else {}
        for block, (first, last, contents) in loaded.items():
            required = wanted.get(block)
            codes = np.array([optional(int(c)) for c in contents], np.int32)
            if required is not None:
                begin, end = max(required[0], first), min(required[1], last)
                codes[begin - first : end - first] = contents[begin - first : end - first]
            self.ledger.expect(r, block, first, codes)
        pages = {b: (f, e) for b, (f, e, _) in wanted.items()}
        for block, (first, last, _) in loaded.items():
            begin, end = pages.get(block, (first, last))
            pages[block] = (min(first, begin), max(last, end))
        self.memory.pull(device_memory.pages(r, pages))
        mismatches, judged = self.ledger.judge_rows(r, pages)
        self.transcript.judge("read", judged)
        wrong_blocks = {m.block for m in mismatches}
        for m in mismatches:
            region = t.LOADED if m.block in loaded else t.CACHED
            if region == t.LOADED and m.expected < 0:
                region = t.OPTIONAL
            self._note("read", tracked.request_id, region, m)
        for block in loaded:
            if block in wanted and block not in wrong_blocks:
                self._restored(r, tracked, block, *wanted[block])

    def _read_running_state(self, r: Resource, work: Work) -> None:
        """The state a running request continues from: the step writes over it, so afterwards nothing would show."""
        table, size = work.tracked.tables[r.group], self.groups[r.group].block_size
        index = 0 if self._mamba_mode == "none" else (work.computed - 1) // size
        if index < len(table) and table[index] != 0:
            self.memory.pull(device_memory.pages(r, [table[index]]))
            mismatches, judged = self.ledger.judge_rows(r, {table[index]: (0, 1)})
            self.transcript.judge("read", judged)
            for m in mismatches:
                self._note("read", work.tracked.request_id, t.CACHED, m)

    def _restored(self, r: Resource, tracked: Tracked, block: int, first: int, last: int, contents: Any) -> None:
        """A block came back right: count it, read its name back, and compare with the source through the views."""
        done = self.transcript
        done.restored_bytes[r.id] = done.restored_bytes.get(r.id, 0) + (last - first) * r.row_bytes
        place = self.ledger.name_of(r, block, first)
        done.origins_checked += 1
        done.origins_wrong += place is not None and place != (r.id, int(contents[0]))
        key = (r.id, int(contents[-1]))
        if (first, last) != (0, r.rows) or key not in self._digests:
            return
        digest, nbytes = self._digest(r, block)
        done.digests.append(
            t.DigestCheck(
                self.scenario, tracked.request_id, r.group, r.layer, block, nbytes, digest == self._digests[key]
            )
        )

    def _write(self, r: Resource, work: Work) -> None:
        tracked, group = work.tracked, self.groups[r.group]
        end = work.computed + work.count
        if group.rule == "state" or r.tokens_per_row == 0:
            self._write_state(r, tracked, work.computed, end)
            return
        rows = self._rows(r, tracked, work.computed if group.rule == "recomputed" else work.kept, end)
        for block, (first, last, contents) in rows.items():
            self._store(r, block, first, contents)
            self.transcript.saved_bytes[r.id] = (
                self.transcript.saved_bytes.get(r.id, 0) + (last - first) * r.row_bytes
            )
            if last < r.rows:
                self.transcript.uncomputed_bytes += (r.rows - last) * r.row_bytes
            elif not (first and work.first and tracked.external):
                # Of a block that is loaded up to here the load may still be under way: this layer waits for it later.
                self._remember(r, block, int(contents[-1]))

    def _store(self, r: Resource, block: int, first_row: int, contents: np.ndarray[Any, Any]) -> None:
        """What the kernel writes: these rows. A connector may be loading others of the same page."""
        self.ledger.write(r, block, first_row, contents)
        self.memory.push(device_memory.rows(r, block, first_row, len(contents)))

    def _write_state(self, r: Resource, tracked: Tracked, begin: int, end: int) -> None:
        table, size = tracked.tables[r.group], self.groups[r.group].block_size
        # A kernel also leaves the state at every block boundary it passes for which vLLM allocated a block.
        boundaries = [] if self._mamba_mode == "none" else range((begin // size + 1) * size, end, size)
        for position in (*boundaries, end):
            index = 0 if self._mamba_mode == "none" else (position - 1) // size
            if index >= len(table) or table[index] == 0:
                continue
            content = tracked.contents[position - 1 : position]
            self._store(r, table[index], 0, content)
            self.transcript.saved_bytes[r.id] = self.transcript.saved_bytes.get(r.id, 0) + r.row_bytes
            if position % size == 0:
                self._remember(r, table[index], int(content[0]))

    def _remember(self, r: Resource, block: int, content: int) -> None:
        """Digest of a block just completed, taken through the runner's own view."""
        self._digests[(r.id, content)] = self._digest(r, block)[0]

    def _digest(self, r: Resource, block: int) -> tuple[bytes, int]:
        view = self.staged.memory.views[r.id]
        ratio = view.shape[0] // self.layout.num_blocks
        page = view[block * ratio : (block + 1) * ratio].contiguous().cpu().view(torch.uint8).numpy()
        return blake3(page.data).digest(), page.nbytes

    @staticmethod
    def _required_from(group: Group, computed: int) -> int:
        """First token the next query still reads, given ``computed`` tokens."""
        if group.rule == "all":
            return 0
        if group.rule == "window":
            return max(0, computed - group.window + 1)
        return computed  # state: judged as a state, recomputed: nothing is read back

    def _rows(
        self, r: Resource, tracked: Tracked, begin: int, end: int
    ) -> dict[int, tuple[int, int, np.ndarray[Any, Any]]]:
        """block -> (first row, last row, contents) of the rows complete in tokens [begin, end) of one resource."""
        group = self.groups[r.group]
        table, size = tracked.tables[r.group], group.block_size
        found: dict[int, tuple[int, int, np.ndarray[Any, Any]]] = {}
        if group.rule == "state" or r.tokens_per_row == 0:
            index = end // size - 1
            if end and end % size == 0 and index < len(table) and table[index] != 0:
                found[table[index]] = (0, 1, tracked.contents[end - 1 : end])
            return found
        per = r.tokens_per_row
        first_row, last_row = begin // per, end // per  # a row begun earlier is complete with its last token
        rows_per_block = size // per
        for index in range(first_row // rows_per_block, -(-last_row // rows_per_block)):
            if index >= len(table) or table[index] == 0:
                continue
            low = max(first_row, index * rows_per_block)
            high = min(last_row, (index + 1) * rows_per_block)
            if low >= high:
                continue
            tokens = np.arange(low, high) * per + per - 1
            offset = index * rows_per_block
            found[table[index]] = (low - offset, high - offset, tracked.contents[tokens])
        return found

    # ------------------------------------------------------------------ judging

    def _judge(self, moment: str, blocks: list[int] | None = None) -> None:
        self.memory.pull(None if blocks is None else device_memory.frames(self.ledger.families, blocks))
        mismatches, judged = self.ledger.judge(blocks)
        self.transcript.judge(moment, judged)
        for m in mismatches:
            request, region = self._whose(m)
            self._note(moment, request, region, m)

    def _whose(self, m: Mismatch) -> tuple[str | None, str]:
        if m.block == 0:
            return None, t.NULL
        if m.resource is None:
            return None, t.PADDING
        for tracked in self.tracked.values():
            for group, table in enumerate(tracked.tables):
                if m.block in table and group == m.group:
                    index = table.index(m.block)
                    cached = (index + 1) * self.groups[group].block_size <= tracked.local
                    return tracked.request_id, t.CACHED if cached else t.COMPUTED
        return None, t.FREE if self.ledger.owner[m.block] < 0 else t.FOREIGN_BLOCK

    def _note(self, moment: str, request: str | None, region: str, mismatch: Mismatch) -> None:
        self.transcript.observations.append(
            t.Observation(
                self.scenario, self.step_number, moment, request, region, mismatch, self._token_of(request, mismatch)
            )
        )
        if mismatch.decoded is not None and mismatch.decoded.content not in self.transcript.names:
            self.transcript.names[mismatch.decoded.content] = self._name(mismatch.decoded.content)
        if self.ledger.taint(mismatch):
            self.memory.push(device_memory.frames(self.ledger.families, [mismatch.block]))

    def _token_of(self, request: str | None, m: Mismatch) -> int | None:
        """Position of the token whose row is wrong; the last one of a compressed row or of a state's block."""
        tracked = self.tracked.get(request or "")
        if tracked is None or m.resource is None or m.block not in tracked.tables[m.group]:
            return None
        first = tracked.tables[m.group].index(m.block) * self.groups[m.group].block_size
        per = self.layout.resources[m.resource].tokens_per_row or self.groups[m.group].block_size
        return first + (m.row + 1) * per - 1

    def _name(self, content: int) -> t.Named:
        named = self.contents.name(content)
        blocks = {}
        for tracked in (*self.tracked.values(), *self.finished):
            if tracked.request_id == named.request:
                for group, table in enumerate(tracked.tables):
                    index = named.token // self.groups[group].block_size
                    if index < len(table):
                        blocks[group] = table[index]
        return t.Named(named.request, named.token, blocks)


def _waits_for(request: Any) -> str:
    """What a request of the scheduler that computes nothing waits for, in words."""
    if request.is_finished():
        return "finished, the connector holds its blocks and has not reported its save"
    if request.status.name == "WAITING_FOR_REMOTE_KVS":
        return "its load is not reported as finished"
    return request.status.name.lower().replace("_", " ")
