"""A scheduler and a worker on paper: legal SchedulerOutputs at random, and the plan a flawless worker makes of them.

Plain Python lists, so that the guard's vectorised code meets an independent opinion.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvproof.trace.declare import Declarer
from kvproof.trace.judge import Judge
from kvproof.trace.records import Group, Plan, Schedule
from kvproof.trace.rules.catalogue import RULES
from kvproof.trace.rules.model import Violation

FULL = Group(0, "full", 4, 64)
SLIDING = Group(1, "sliding", 4, 64, window=6)
STATE = Group(2, "state", 8, 64)
BUDGET = 64
STALE = 63
"""Stands in every table cell nobody declared."""


def new(name: str, computed: int, *blocks: Sequence[int], prompt: int = 8) -> SimpleNamespace:
    """A NewRequestData with a prompt of ``prompt`` tokens."""
    return SimpleNamespace(
        req_id=name,
        num_computed_tokens=computed,
        block_ids=tuple(list(b) for b in blocks),
        prompt_token_ids=[1] * prompt,
    )


def output(
    tokens: Mapping[str, int],
    fresh: Iterable[SimpleNamespace] = (),
    cached: Mapping[str, tuple[int, Sequence[Sequence[int]] | None]] | None = None,
    resumed: Iterable[str] = (),
    finished: Iterable[str] = (),
    preempted: Iterable[str] = (),
    drafts: Mapping[str, int] | None = None,
    lengths: Mapping[str, int] | None = None,
    **changes: Any,
) -> SimpleNamespace:
    """A SchedulerOutput. ``cached`` maps an id to (computed tokens, new block ids per group or None).

    ``lengths`` are the tokens of resumed requests.
    """
    cached = cached or {}
    values: dict[str, Any] = {
        "num_scheduled_tokens": dict(tokens),
        "total_num_scheduled_tokens": sum(tokens.values()),
        "scheduled_new_reqs": list(fresh),
        "scheduled_cached_reqs": SimpleNamespace(
            req_ids=list(cached),
            resumed_req_ids=set(resumed),
            new_block_ids=[None if b is None else tuple(list(one) for one in b) for _, b in cached.values()],
            num_computed_tokens=[computed for computed, _ in cached.values()],
            all_token_ids={name: [1] * (lengths or {}).get(name, 8) for name in resumed},
        ),
        "scheduled_spec_decode_tokens": {name: [-1] * count for name, count in (drafts or {}).items()},
        "finished_req_ids": set(finished),
        "preempted_req_ids": set(preempted),
        "new_block_ids_to_zero": None,
        "kv_cache_block_copies": None,
    }
    return SimpleNamespace(**{**values, **changes})


@dataclass
class Request:
    """What the paper scheduler knows of a request: ``length`` tokens in the end, ``end`` of them declared so far."""

    name: str
    prompt: int
    length: int
    end: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    drafts: int = 0
    low: dict[int, int] = field(default_factory=dict)

    def full_blocks(self, size: int) -> int:
        """Blocks of ``size`` tokens that were computed in earlier steps for certain (drafts may be rejected)."""
        return max(self.end - self.drafts - 1, 0) // size

    def held(self, group: int) -> list[int]:
        """Its blocks from the first one that is still read."""
        return self.blocks[group][self.low.get(group, 0) :]


class Scheduler:
    """Makes legal outputs at random. ``plain`` says whether the last one holds nothing that needs a closer look.

    ``calm`` is how often a step is one in which nobody comes, goes or loses its place.
    """

    def __init__(self, seed: int, groups: Sequence[Group] = (FULL,), speculate: bool = False, calm: float = 0.3):
        self.random = random.Random(seed)
        self.groups, self.speculate, self.calm = tuple(groups), speculate, calm
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.gone: set[str] = set()
        self.lost: set[str] = set()
        self.number = 0
        self.plain = True

    def step(self) -> SimpleNamespace:
        """The next output; it may hold no request at all."""
        r = self.random
        finished, self.gone = self.gone, set()
        preempted, self.lost = self.lost, set()
        tokens: dict[str, int] = {}
        drafts: dict[str, int] = {}
        cached: dict[str, tuple[int, list[list[int]] | None]] = {}
        fresh: list[SimpleNamespace] = []
        resumed: list[str] = []
        touched: set[tuple[int, int]] = set()
        calm = r.random() < self.calm  # a decoding step like most: everybody, one token each
        running = [q for q in self.requests.values() if calm or r.random() < 0.85]
        for request in running:
            start = self._rolled_back(request)
            count = min(r.randint(1, 9), request.prompt - start) if start < request.prompt else 1
            if self.speculate and start >= request.prompt and r.random() < 0.6:
                count += (drafts_now := r.randint(1, 3))
            else:
                drafts_now = 0
            for group in self.groups:  # what has left the window is free for others at once
                if group.window:
                    request.low[group.index] = max(start - group.window + 1, 0) // group.block_size
            grown = self._grow(request, start + count, touched)
            if grown is None:
                continue
            tokens[request.name], request.drafts = count, drafts_now
            if drafts_now:
                drafts[request.name] = drafts_now
            cached[request.name] = (start, grown if any(grown) else None)
            request.end = start + count
            self._written(request, start, count, touched)
        if self.waiting and not calm and r.random() < 0.5:  # V1 resumes as cached with a whole row, V2 as new
            request = self.waiting.pop()
            request.end, request.drafts, request.low = 0, 0, {}
            request.blocks = [[] for _ in self.groups]
            request.prompt = request.length  # what was generated is computed again with it
            count = min(request.prompt, 6)
            if self._grow(request, count, touched) is not None:
                self.requests[request.name] = request
                tokens[request.name], request.end = count, count
                blocks = [list(b) for b in request.blocks]
                if r.random() < 0.5:
                    cached[request.name] = (0, blocks)
                    resumed.append(request.name)
                else:
                    fresh.append(new(request.name, 0, *blocks, prompt=request.length))
                self._written(request, 0, count, touched)
            else:
                self.waiting.append(request)
        for _ in range(0 if calm else r.randint(0, 2)):
            if len(self.requests) < 6:
                admitted = self._admit(touched)
                if admitted is not None:
                    request, start = admitted
                    fresh.append(new(request.name, start, *request.blocks, prompt=request.prompt))
                    tokens[request.name] = request.end - start
                    self._written(request, start, request.end - start, touched)
        uses = self.uses()
        self.plain = all(uses[cell] <= 1 for cell in touched) and finished.isdisjoint(tokens)
        lengths = {name: self.requests[name].length for name in resumed}
        made = output(tokens, fresh, cached, resumed, finished, preempted, drafts, lengths)
        for request in list(self.requests.values()):
            if request.end >= request.length and not request.drafts and r.random() < 0.4:
                self.gone.add(self.requests.pop(request.name).name)
            elif r.random() < 0.03 and not calm and request.name not in self.gone:
                self.waiting.append(self.requests.pop(request.name))
                self.lost.add(request.name)
        return made

    def _rolled_back(self, request: Request) -> int:
        return request.end - self.random.randint(0, request.drafts)

    def _admit(self, touched: set[tuple[int, int]]) -> tuple[Request, int] | None:
        r = self.random
        self.number += 1
        prompt = r.randint(1, 12)
        request = Request(f"r{self.number}", prompt, prompt + r.randint(1, 30), blocks=[[] for _ in self.groups])
        start = 0
        size = self.groups[0].block_size
        donors = [q for q in self.requests.values() if q.full_blocks(size)] if len(self.groups) == 1 else []
        if donors and r.random() < 0.5:  # a prefix hit on full blocks that are already computed
            donor = r.choice(donors)
            shared = r.randint(1, donor.full_blocks(size))
            request.blocks[0] = donor.blocks[0][:shared]
            touched |= {(0, block) for block in request.blocks[0]}
            start = shared * size
        request.prompt += start
        request.length += start
        count = min(request.prompt - start, r.randint(1, 12))
        if self._grow(request, start + count, touched) is None:
            return None
        request.end = start + count
        self.requests[request.name] = request
        return request, start

    def _grow(self, request: Request, end: int, touched: set[tuple[int, int]]) -> list[list[int]] | None:
        """Blocks for ``end`` tokens, None when a pool is empty (nothing has changed then)."""
        grown: list[list[int]] = []
        for group, blocks in zip(self.groups, request.blocks, strict=True):
            missing = -(-end // group.block_size) - len(blocks)
            held = {b for q in self.requests.values() for b in q.held(group.index)} | set(request.held(group.index))
            free = [b for b in range(1, group.num_blocks) if b not in held]
            self.random.shuffle(free)
            if missing > len(free):
                return None
            grown.append(free[: max(missing, 0)])
        for index, ids in enumerate(grown):
            request.blocks[index] += ids
            touched |= {(index, block) for block in ids}
        return grown

    def _written(self, request: Request, start: int, count: int, touched: set[tuple[int, int]]) -> None:
        for group in self.groups:
            if group.slotted:
                for position in range(start, start + count):
                    touched.add((group.index, request.blocks[group.index][position // group.block_size]))

    def uses(self) -> Counter[tuple[int, int]]:
        """In how many rows a block stands."""
        return Counter((g, b) for q in self.requests.values() for g in range(len(self.groups)) for b in q.held(g))


def plan(schedule: Schedule, seed: int, slack: bool = False) -> Plan:
    """The plan of a flawless worker for what was declared: order of its own, stale tails, padding now and then."""
    r = random.Random(seed)
    order = list(range(len(schedule.ids)))
    r.shuffle(order)
    ids = [schedule.ids[i] for i in order]
    tokens = [int(schedule.tokens[i]) for i in order]
    declared = [int(schedule.start[i]) for i in order]
    # Only what was generated can be taken back.
    target = [int(schedule.shadow.target[schedule.rows[i]]) for i in order]
    room = [r.randint(0, min(3, max(s - t, 0))) if slack else 0 for s, t in zip(declared, target, strict=True)]
    start = [max(0, s - r.randint(0, k)) for s, k in zip(declared, room, strict=True)]
    pad_tokens, pad_rows = r.choice(((0, 0), (3, 2)))
    blocks = {
        (g.index, name): schedule.shadow.blocks(g.index, schedule.shadow.row_of[name]).tolist()
        for g in schedule.groups
        for name in ids
    }
    slots: list[Any] = []
    tables: list[Any] = []
    for group in schedule.groups:
        flat = [
            blocks[group.index, name][p // group.block_size] * group.block_size + p % group.block_size
            for name, s, n in zip(ids, start, tokens, strict=True)
            for p in range(s, s + n)
            if group.slotted
        ]
        slots.append(np.array(flat + [-1] * pad_tokens, np.int64) if group.slotted else None)
        width = max((len(blocks[group.index, name]) for name in ids), default=0) + 2
        table = np.full((len(ids) + pad_rows, width), STALE, np.int32)
        for row, name in enumerate(ids):
            table[row, : len(blocks[group.index, name])] = blocks[group.index, name]
        tables.append(table)
    edges = [0]
    for n in tokens:
        edges.append(edges[-1] + n)
    fresh = set(schedule.appended.who.tolist())
    return Plan(
        step=schedule.step,
        ids=ids,
        declared_ids=schedule.ids,
        rows=np.array([schedule.rows[i] for i in order], np.int64),
        tokens=np.array(tokens, np.int64),
        start=np.array(declared, np.int64),
        slack=np.array(room, np.int64),
        num_tokens=sum(tokens),
        query_start=np.array(edges + [edges[-1]] * pad_rows, np.int32),
        positions=np.array(
            [p for s, n in zip(start, tokens, strict=True) for p in range(s, s + n)] + [0] * pad_tokens, np.int64
        ),
        seq_lens=np.array([s + n for s, n in zip(start, tokens, strict=True)] + [0] * pad_rows, np.int32),
        slots=slots,
        tables=tables,
        groups=schedule.groups,
        shadow=schedule.shadow,
        whole=r.random() < 0.5,
        fresh=np.array([i in fresh for i in order], np.bool_),
    )


def findings(record: Any) -> list[Violation]:
    """What the guard's judge reports with all rules on; a rule that fails is an error of the rule."""
    return _JUDGE.judge(record)


def _fail(where: str, error: BaseException) -> None:
    raise AssertionError(f"{where}: {error!r}")


_JUDGE = Judge(RULES, _fail)


def declarer(groups: Sequence[Group] = (FULL,)) -> Declarer:
    """A Declarer with a budget."""
    return Declarer(groups, BUDGET)
