"""Random traffic on a real engine with the guard on: proves that legal traffic raises no alarm. Run as a child process.

    python traced_soak.py '{"grounds": [["plain", "on"]], "seed": 1, "models": "/tmp/models"}'

One JSON object per ground on standard output, one engine each, one after the other in this process. A ground whose
traffic did not bring about what it is there for (``must``) is a failure like a false alarm: ``missing`` names it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvproof.engine import traced

VOCABULARY = 256

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
DRAFT = {"method": "draft_model", "model": "{models}/qwen3-draft", "num_speculative_tokens": 3}
CPU_STORE = {"kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 26}}
EXAMPLE_STORE = {"kv_connector_extra_config": {"shared_storage_path": "{store}"}}
SIMPLE = {"kv_connector": "SimpleCPUOffloadConnector", **CPU_STORE}
OFFLOADING = {"kv_connector": "OffloadingConnector", **CPU_STORE}
EXAMPLE = {"kv_connector": "ExampleConnector", **EXAMPLE_STORE}
MULTI = {
    "kv_connector": "MultiConnector",
    "kv_connector_extra_config": {"connectors": [{"kv_role": "kv_both", **c} for c in (SIMPLE, OFFLOADING)]},
}
LOSSY = {"kv_connector_module_path": "lossy_connectors", "kv_load_failure_policy": "recompute"}

DTYPES = {"tiny-qwen3-next": "bfloat16"}
"""Models that do not run in float32: vLLM's CPU kernel of gated delta nets wants bfloat16."""

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


def model_config(name: str) -> dict[str, Any]:
    """The smallest float32 model of a kind: float32 is the fast type of most CPUs."""
    if name == "qwen3":
        return QWEN3
    if name == "qwen3-draft":  # the first layer of the same model: it agrees with it now and then
        return {**QWEN3, "num_hidden_layers": 1}
    from kvproof.zoo import describe

    config = {**describe(name).config, "torch_dtype": DTYPES.get(name, "float32"), "vocab_size": VOCABULARY}
    if name == "tiny-gemma3":
        config |= {"num_hidden_layers": 3, "sliding_window": 64, "hidden_size": 64, "intermediate_size": 64}
        config |= {"num_attention_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 32}
    if name == "tiny-qwen3-next":
        config |= {"num_hidden_layers": 2, "full_attention_interval": 2}
    if name == "tiny-deepseek-v3":
        config |= {"num_hidden_layers": 2}
    return config


@dataclass(frozen=True)
class Ground:
    """One engine and its traffic.

    ``must`` names counters of :class:`Tally` that have to be above zero. ``engine`` are arguments of TracedEngine.
    ``block`` is the block size asked for [tokens], ``longest`` the longest prompt in blocks of the size in use,
    ``outputs`` the choice of output lengths in tokens. The probabilities are per turn of the traffic loop.
    ``alphabet`` is how many tokens random prompts are made of; few make drafts.
    """

    name: str
    requests: int
    must: tuple[str, ...]
    runner: str = "v1"
    model: str = "qwen3"
    block: int = 32
    engine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    connector: dict[str, Any] | None = None
    outputs: tuple[int, ...] = (1, 1, 2, 3, 5)
    longest: int = 4
    burst: int = 6
    turns: int = 3
    abort: float = 0.1
    reset: float = 0.05
    reset_running: float = 0.02
    twins: float = 0.3
    resubmit: float = 0.5
    avoid: int | None = None
    """Prompt lengths that leave this rest in a division by the block size are not sent."""
    alphabet: int = VOCABULARY - 4


USUAL = ("prefix_hits", "aborted", "resets", "shared_in_one_step", "resubmitted", "queued")
CONTENT = {"content": True, "full_check_every": 5}
SMALL = {"num_blocks": 64, "max_model_len": 320, "max_num_seqs": 8, "max_num_batched_tokens": 1024}
STATES = {**SMALL, "max_model_len": 1024}
"""For models with states, whose blocks hold 96 or 160 tokens."""

GROUNDS = {
    ground.name: ground
    for ground in (
        Ground("plain", 1000, USUAL, engine={**SMALL, "max_num_seqs": 16, "num_blocks": 128}),
        Ground("content", 120, (*USUAL, "content_checked"), engine=SMALL, options=CONTENT),
        Ground(
            "chunked", 150, (*USUAL, "chunked"), engine={**SMALL, "max_num_batched_tokens": 48}, longest=6,
            options={"full_check_every": 3},
        ),
        Ground(
            "preemption", 100, (*USUAL, "preempted", "resumed", "reset_preempted"), engine={**SMALL, "num_blocks": 14},
            outputs=(1, 20, 40), reset_running=0.06, options={"full_check_every": 2},
        ),
        Ground(
            "preemption-content", 60, ("preempted", "resumed", "content_checked"), engine={**SMALL, "num_blocks": 14},
            outputs=(1, 20, 40), options=CONTENT,
        ),
        Ground(
            "async", 150, (*USUAL, "ahead"), engine={**SMALL, "async_scheduling": True}, outputs=(1, 2, 5, 12),
            options={"full_check_every": 4},
        ),
        Ground(
            "async-tiny", 100, ("ahead", "chunked", "preempted", "aborted"),
            engine={**SMALL, "async_scheduling": True, "max_num_batched_tokens": 16, "num_blocks": 16,
                    "max_num_seqs": 4}, outputs=(1, 3, 30), options={"full_check_every": 2}, longest=3,
        ),
        Ground(
            "ngram", 100, (*USUAL, "drafts", "rejected", "accepted", "preempted", "content_checked"),
            engine={**SMALL, "speculative": NGRAM, "num_blocks": 20}, outputs=(1, 4, 16, 40), alphabet=3,
            options=CONTENT,
        ),
        Ground(
            "sliding", 80, (*USUAL, "window_releases", "windowed_groups"), model="tiny-gemma3",
            engine={**SMALL, "max_model_len": 512}, longest=8, outputs=(1, 3, 40), options={"full_check_every": 3},
        ),
        Ground(
            "sliding-preemption", 60, ("window_releases", "windowed_groups", "preempted", "chunked"),
            model="tiny-gemma3", engine={**SMALL, "num_blocks": 40, "max_model_len": 512, "max_num_batched_tokens": 80},
            longest=6, outputs=(1, 20, 40), options=CONTENT,
        ),
        Ground(
            "mamba", 50, ("state_groups", "aborted", "queued"), model="tiny-qwen3-next",
            engine={**STATES, "max_num_seqs": 4, "enable_prefix_caching": False}, options={"full_check_every": 3},
        ),
        Ground(
            "mamba-align", 50, ("state_groups", "aborted", "prefix_hits", "queued"), model="tiny-qwen3-next",
            engine={**STATES, "max_num_seqs": 4}, longest=3, options={"full_check_every": 3},
        ),
        # vLLM's CPU build serves MLA without prefix caching and without chunked prefill.
        Ground("mla", 60, ("aborted", "queued", "preempted"), model="tiny-deepseek-v3", block=16,
               engine={**SMALL, "num_blocks": 24}, outputs=(1, 20), options={"full_check_every": 3}),
        Ground("events", 100, (*USUAL, "events_judged"), engine={**SMALL, "kv_events": True},
               options={"full_check_every": 2}),
        Ground(
            "simple", 120, ("external_hits", "loads_async", "transfers", "aborted", "resets"), connector=SIMPLE,
            engine={**SMALL, "num_blocks": 24}, reset=0.15, reset_running=0, options={"full_check_every": 3},
        ),
        Ground(
            "simple-content", 60, ("external_hits", "content_checked"), connector=SIMPLE,
            engine={**SMALL, "num_blocks": 24}, reset=0.15, reset_running=0, options=CONTENT,
        ),
        Ground(
            "offloading", 120, ("external_hits", "transfers", "aborted", "resets"), connector=OFFLOADING,
            engine={**SMALL, "num_blocks": 24}, reset=0.15, reset_running=0, options={"full_check_every": 3},
            resubmit=0,  # vLLM 0.32: a reused id ends this connector with a KeyError in _build_store_jobs
        ),
        Ground(
            "example", 40, ("external_hits", "aborted", "resets"), connector=EXAMPLE,
            engine={**SMALL, "max_num_batched_tokens": 2048}, reset=0.15, reset_running=0,
            options={"full_check_every": 3}, avoid=1,  # vLLM 0.32 offers a negative number of tokens for these
        ),
        Ground(
            "sliding-async", 70, ("window_releases", "ahead"), model="tiny-gemma3", longest=6,
            engine={**SMALL, "num_blocks": 60, "max_num_batched_tokens": 70, "async_scheduling": True},
            outputs=(1, 20, 60), options=CONTENT,
        ),
        Ground(
            "mamba-tight", 50, ("state_groups", "preempted", "chunked"), model="tiny-qwen3-next", longest=4,
            engine={**STATES, "num_blocks": 20, "max_num_batched_tokens": 200}, outputs=(1, 20, 60), options=CONTENT,
        ),
        Ground(
            "mamba-async", 50, ("state_groups", "ahead"), model="tiny-qwen3-next", longest=4,
            engine={**STATES, "num_blocks": 30, "async_scheduling": True}, outputs=(1, 20, 60), options=CONTENT,
        ),
        Ground(
            "simple-tight", 70, ("external_hits", "preempted"), connector=SIMPLE, reset=0.2, reset_running=0,
            engine={**SMALL, "num_blocks": 14, "max_num_batched_tokens": 100}, outputs=(1, 20, 60), options=CONTENT,
        ),
        Ground(
            "simple-async", 80, ("external_hits", "ahead"), connector=SIMPLE, reset=0.2, reset_running=0,
            engine={**SMALL, "num_blocks": 18, "async_scheduling": True}, outputs=(1, 20, 40), options=CONTENT,
        ),
        Ground(
            "simple-sliding", 60, ("external_hits", "window_releases"), connector=SIMPLE, model="tiny-gemma3",
            engine={**SMALL, "num_blocks": 60}, outputs=(1, 20, 40), reset=0.2, reset_running=0, options=CONTENT,
            longest=6,
        ),
        Ground(
            "offloading-tight", 70, ("external_hits", "preempted"), connector=OFFLOADING, reset=0.2,
            engine={**SMALL, "num_blocks": 14, "max_num_batched_tokens": 100}, outputs=(1, 20, 60), resubmit=0,
            reset_running=0, options=CONTENT,
        ),
        Ground(
            "multi", 70, ("external_hits",), connector=MULTI, reset=0.2, reset_running=0, resubmit=0,
            engine={**SMALL, "num_blocks": 18}, outputs=(1, 20, 40), options=CONTENT,
        ),
        Ground(
            "lossy", 60, ("external_hits", "loads_sync", "invalid_blocks"), connector={**LOSSY, **EXAMPLE_STORE,
            "kv_connector": "LossyExample"}, engine={**SMALL, "max_num_batched_tokens": 2048}, reset=0.4,
            reset_running=0, options=CONTENT, avoid=1,
        ),
        Ground(
            "lossy-async", 100, ("external_hits", "loads_async", "invalid_blocks"), connector={**LOSSY, **CPU_STORE,
            "kv_connector": "LossySimple"}, engine={**SMALL, "num_blocks": 24}, reset=0.3, reset_running=0,
            options=CONTENT,
        ),
        Ground(
            "events-tight", 60, ("events_judged", "preempted"), reset_running=0.05,
            engine={**SMALL, "num_blocks": 14, "kv_events": True}, outputs=(1, 20, 40),
            options={"full_check_every": 1},
        ),
        Ground(
            "priority", 60, ("preempted",), engine={**SMALL, "num_blocks": 14, "scheduling_policy": "priority"},
            outputs=(1, 20, 40), options=CONTENT,
        ),
        Ground(
            "draft-async", 80, ("drafts", "rejected", "accepted", "ahead"),
            engine={**SMALL, "num_blocks": 24, "speculative": DRAFT, "async_scheduling": True}, outputs=(1, 10, 40),
            options=CONTENT,
        ),
        Ground(
            "no-cache", 60, ("preempted",), engine={**SMALL, "num_blocks": 14, "enable_prefix_caching": False},
            outputs=(1, 20, 40), options=CONTENT,
        ),
        Ground(
            "v2-plain", 30, (*USUAL, "preempted", "resumed"), runner="v2",
            engine={**SMALL, "num_blocks": 12, "max_num_seqs": 4}, longest=3, outputs=(1, 3, 20),
            options={"full_check_every": 2}, reset_running=0.05, abort=0.15,
        ),
        Ground(
            "v2-content", 15, ("prefix_hits", "content_checked"), runner="v2",
            engine={**SMALL, "num_blocks": 16, "max_num_seqs": 4}, longest=3, outputs=(1, 3, 20), options=CONTENT,
        ),
        Ground(
            "v2-async", 25, ("ahead", "prefix_hits"), runner="v2",
            engine={**SMALL, "num_blocks": 24, "max_num_seqs": 4, "async_scheduling": True}, longest=3,
            outputs=(1, 3, 8), options={"full_check_every": 2},
        ),
        Ground(
            "v2-ngram", 20, ("drafts", "rejected", "accepted", "judged_speculation"), runner="v2",
            engine={**SMALL, "max_num_seqs": 4, "speculative": NGRAM}, longest=2, outputs=(1, 4, 12), alphabet=3,
            options={"full_check_every": 2},
        ),
        Ground(
            "v2-draft-async", 20, ("drafts", "rejected", "judged_speculation", "ahead"), runner="v2",
            engine={**SMALL, "max_num_seqs": 4, "speculative": DRAFT, "async_scheduling": True}, longest=2,
            outputs=(1, 4, 12), options={"full_check_every": 2},
        ),
        Ground(
            "v2-sliding", 15, ("windowed_groups", "window_releases", "prefix_hits"), runner="v2", model="tiny-gemma3",
            engine={**SMALL, "max_num_seqs": 4}, longest=5, outputs=(1, 3, 40), options={"full_check_every": 2},
        ),
        Ground(
            "v2-mamba", 12, ("state_groups",), runner="v2", model="tiny-qwen3-next",
            engine={**STATES, "max_num_seqs": 4}, longest=2, options={"full_check_every": 2},
        ),
        Ground(
            "v2-simple", 25, ("external_hits", "loads_async", "transfers"), runner="v2", connector=SIMPLE,
            engine={**SMALL, "num_blocks": 16, "max_num_seqs": 4}, longest=3, reset=0.2, reset_running=0,
            options={"full_check_every": 2},
        ),
    )
}


class Tally:
    """What happened, counted from the log alone."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.violations: Counter[str] = Counter()
        self.errors: list[str] = []
        self.first: list[str] = []
        self.steps = 0
        self._preempted: set[str] = set()
        self._finished: set[str] = set()
        self._scheduled: set[str] = set()
        self.stopped: set[str] = set()
        """Ids that were scheduled before they were declared as finished."""
        self._binds: dict[int, dict[str, Any]] = {}
        self._released: dict[int, set[str]] = {}

    def take(self, events: Iterable[dict[str, Any]]) -> None:
        """Count these events, in the order of one process's log."""
        for event in events:
            handler = getattr(self, "_" + event["event"].replace(".", "_"), None)
            if handler is not None:
                handler(event)

    def _kv_enabled(self, event: dict[str, Any]) -> None:
        self.seen["events_judged"] += "events_disagree_with_pool" in event["rules"]
        for group in event["groups"]:
            self.seen["windowed_groups"] += group["kind"] == "sliding"
            self.seen["state_groups"] += group["kind"] == "state"

    def _kv_bind(self, event: dict[str, Any]) -> None:
        self.steps += 1
        ids, drafts = event["requests"], event.get("drafts", [])
        # What a scheduled request gave back while it was being scheduled has left its attention window.
        gave = self._released.pop(event["step"], set()) & set(ids) - set(event["new"]) - set(event["resumed"])
        self.seen["released_while_running"] += len(gave)
        self._binds[event["step"]] = event
        self.seen["drafts"] += sum(drafts)
        self.seen["preempted"] += len(event["preempted"])
        again = set(event["new"]) & self._preempted
        self.seen["resumed"] += len(event["resumed"]) + len(again)
        self._preempted = (self._preempted | set(event["preempted"])) - again
        self.seen["reset_preempted"] += len(set(event["preempted"]) & set(ids))
        self._finished |= set(event["finished"])
        self.stopped |= set(event["finished"]) & self._scheduled
        self._scheduled |= set(ids)
        self.seen["resubmitted"] += len(self._finished & set(event["new"]))
        start = dict(zip(ids, event["start"], strict=True))
        self.seen["prefix_hits"] += sum(start.get(name, 0) > 0 for name in event["new"])
        self.seen["zeroed"] += len(event.get("zero", []))
        users: Counter[tuple[int, int]] = Counter()
        for _, group, _, blocks in event["blocks"]:
            users.update({(group, block) for block in blocks if block})
        self.seen["shared_in_one_step"] += sum(count > 1 for count in users.values())

    def _kv_release(self, event: dict[str, Any]) -> None:
        if event["freed"] and event["step"] not in self._binds:
            self._released.setdefault(event["step"], set()).add(event["request"])

    def _boundary(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "result":
            bind = self._binds.get(event["step"])
            if bind and "sampled" in event:
                drafts = dict(zip(bind["requests"], bind.get("drafts", []), strict=False))
                for name, sampled in zip(event["requests"], event["sampled"], strict=True):
                    self.seen["chunked"] += sampled == 0
                    if drafts.get(name, 0) and sampled:
                        self.seen["accepted"] += sampled - 1
                        self.seen["rejected"] += drafts[name] + 1 - sampled
            newest = max(self._binds, default=0)
            self.seen["ahead"] += event["step"] is not None and newest > event["step"]
        elif kind == "reset":
            self.seen["resets"] += 1
            self.seen["resets_with_requests"] += bool(event["requests"])
        elif kind == "content":
            self.seen["content_checked"] += event["checked"]
        elif kind == "match":
            self.seen["external_hits"] += bool(event["matched"])
        elif kind == "load_target":
            self.seen["loads_async" if event.get("is_async") else "loads_sync"] += 1
        elif kind == "transfers":
            self.seen["transfers"] += 1
            self.seen["invalid_blocks"] += len(event["invalid_blocks"])
        elif kind == "finished":
            self.seen["delayed_frees"] += event["delayed"]
        elif kind == "speculation":
            self.seen["judged_speculation"] += 1

    def _kv_violation(self, event: dict[str, Any]) -> None:
        self.violations[event["rule"]] += 1
        if len(self.first) < 5:
            self.first.append(f"{event['role']} step {event['step']}: {event['message']}")

    def _kv_error(self, event: dict[str, Any]) -> None:
        who = "guard" if event["guard"] else "native"
        self.errors.append(f"{who} {event['where']}: {event['type']}: {event['message'][:300]} {event['traceback']}")


class Traffic:
    """Submits, aborts and resets. A function of the seed and of which requests are finished at which step."""

    def __init__(self, engine: traced.TracedEngine, ground: Ground, seed: int):
        self.engine, self.ground = engine, ground
        self.random = random.Random(f"{ground.name} {seed}")
        # vLLM raises the block size where a state needs more room than a block of attention; how far, the host's
        # processor decides (with AVX512_BF16 the states of gated delta nets are float32). Prompts follow.
        self._block = engine.config.cache_config.block_size
        longest = ground.longest * self._block + 8
        self._bases = [self._tokens(longest) for _ in range(3)]
        self._prompts: dict[str, list[int]] = {}
        self._aborted: list[tuple[str, int]] = []
        self._steps = 0
        self.aborted: set[str] = set()
        self.asked: Counter[str] = Counter()
        self.answers: dict[str, list[int]] = {}

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.ground.alphabet) for _ in range(count)]

    def _prompt(self) -> list[int]:
        r, ground = self.random, self.ground
        near = r.randrange(ground.longest + 1) * self._block + r.choice((-1, 0, 0, 1, 2, r.randrange(self._block)))
        count = max(1, near)
        if count % self._block == ground.avoid:
            count += 1
        kind = r.random()
        if kind < 0.5:
            return r.choice(self._bases)[:count]
        if kind < 0.8:
            shared = r.randrange(count + 1)
            return r.choice(self._bases)[:shared] + self._tokens(count - shared)
        return self._tokens(count)

    def _submit(self, name: str, prompt: list[int], outputs: int | None = None) -> None:
        limit = self.ground.engine["max_model_len"] - len(prompt)
        count = self.random.choice(self.ground.outputs) if outputs is None else outputs
        self.engine.add(name, prompt, max_tokens=max(1, min(count, limit)))
        self._prompts[name] = prompt

    def _step(self) -> None:
        self.engine.step()
        self._steps += 1

    def _unfinished(self) -> list[str]:
        requests = self.engine.scheduler.requests
        return [name for name in requests if not requests[name].is_finished()]

    def _abort(self, names: list[str]) -> None:
        self.engine.abort(names)
        self._aborted += [(name, self._steps) for name in names]
        self.aborted |= set(names)

    def _again(self) -> None:
        """An aborted id comes back, but not while a step that holds its first life is under way: vLLM would book that
        step's tokens on the second one."""
        asynchronous = getattr(self.engine.core, "batch_queue", None) is not None
        for name, at in self._aborted:
            if name in self._prompts and name not in self.engine.scheduler.requests:
                if asynchronous and self._steps < at + 3:
                    continue
                self._aborted.remove((name, at))
                self._submit(name, self._prompts[name] if self.random.random() < 0.5 else self._prompt())
                return

    def _certain(self) -> None:
        """What has to happen at least once, whatever chance brings: hits of both kinds, twins, an abort, a return."""
        base = self._bases[0]
        for name in ("first", "local-hit", "external-hit"):
            self._submit(name, base, outputs=2)
            self.engine.run()
            if name == "local-hit":
                self.engine.reset()
        twin = self._tokens(2 * self._block + 3)
        for n in range(self.ground.engine["max_num_seqs"] + 2):
            self._submit(f"twin-{n}", twin if n < 2 else self._tokens(5), outputs=12)
        while not any(request.request_id == "twin-1" for request in self.engine.scheduler.running):
            self._step()
        self.asked["queued"] += 1
        self._abort(["twin-1"])
        for _ in range(4 if self.ground.resubmit else 0):
            self._step()
            self._again()
        self.engine.reset()

    def run(self) -> None:
        """All of the ground's requests, then until nothing is left."""
        r, ground, engine = self.random, self.ground, self.engine
        self._certain()
        submitted = 0
        while submitted < ground.requests or engine.busy:
            burst = 0
            if len(self._unfinished()) < 4 * ground.engine["max_num_seqs"]:
                burst = min(r.randrange(ground.burst + 1), ground.requests - submitted)
            prompt: list[int] | None = None
            for _ in range(burst):
                if prompt is None or r.random() >= ground.twins:
                    prompt = self._prompt()
                self._submit(f"r{submitted}", prompt)
                submitted += 1
            self.asked["queued"] += len(engine.scheduler.waiting) > 0
            for _ in range(r.randrange(ground.turns + 1)):
                self._step()
            if r.random() < ground.abort:
                unfinished = self._unfinished()
                names = r.sample(unfinished, min(len(unfinished), r.randrange(1, 3)))
                self._abort([*names, "never-submitted"] if r.random() < 0.3 else names)
            if self._aborted and r.random() < ground.resubmit:
                self._again()
            if r.random() < ground.reset:
                engine.reset()
            if r.random() < ground.reset_running:
                engine.reset(running=True)
            if not burst and engine.busy:
                self._step()
        # One step more: it carries the last finished ids to the worker.
        self._submit("last", [1, 2, 3])
        engine.run()
        self.answers = {name: served.tokens for name, served in engine.served.items()}


def checkpoint_of(name: str, models: Path) -> Path:
    """The checkpoint of a model, made when it is not there."""
    directory = models / name
    if not (directory / "config.json").exists():
        from kvproof.zoo import checkpoint

        checkpoint.make(directory, model_config(name))
    return directory


def play(ground: Ground, seed: int, models: Path, guard: str = "on") -> dict[str, Any]:
    """Run one ground; its result as plain JSON.

    ``guard``: on | off (no entry in the config) | disabled (enabled: false); the traffic is the same.
    """
    arguments = dict(ground.engine)
    model = checkpoint_of(ground.model, models)
    if arguments.get("speculative"):
        checkpoint_of("qwen3-draft", models)
        arguments["speculative"] = json.loads(json.dumps(arguments["speculative"]).replace("{models}", str(models)))
    if arguments.pop("kv_events", False):
        from vllm.config import KVEventsConfig

        arguments["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as store:
        if ground.connector is not None:
            from vllm.config import KVTransferConfig

            raw = json.loads(json.dumps(ground.connector).replace("{store}", store))
            arguments["connector"] = KVTransferConfig(kv_role="kv_both", **raw)
        engine = traced.TracedEngine(
            model,
            runner=ground.runner,
            options={"on": dict(ground.options), "off": None, "disabled": {"enabled": False}}[guard],
            block_size=ground.block,
            dtype=DTYPES.get(ground.model, "float32"),
            **arguments,
        )
        try:
            ready = time.monotonic()
            traffic = Traffic(engine, ground, seed)
            crash = ""
            try:
                traffic.run()
            except Exception:
                crash = traceback.format_exc()
            served = time.monotonic()
            tally = Tally()
            tally.take(engine.events())
            counters = {
                role: owner.kv_trace_guard.counters()
                for role, owner in (("scheduler", engine.scheduler), ("worker", engine.runner))
                if getattr(owner, "kv_trace_guard", None) is not None
            }
            found = wrapped(engine)
        finally:
            _end(engine)
    seen = tally.seen + traffic.asked
    if guard == "on":
        seen["aborted"] = len(tally.stopped & traffic.aborted)
        seen["events_judged"] *= counters["scheduler"]["judged"].get("PoolState", 0)
        seen["window_releases"] = seen["released_while_running"] if seen["windowed_groups"] else 0
    return {
        "ground": ground.name,
        "seed": seed,
        "crash": crash,
        "guard": guard,
        "requests": len(traffic.answers),
        "steps": tally.steps,
        "start_s": round(ready - started, 1),
        "serve_s": round(served - ready, 1),
        "violations": dict(tally.violations),
        "errors": tally.errors,
        "first": tally.first,
        "seen": {name: seen[name] for name in sorted(seen) if seen[name]},
        "missing": [name for name in ground.must if not seen[name]] if guard == "on" else [],
        "wrapped": found,
        "counters": counters,
        "answers": traffic.answers,
    }


def wrapped(engine: traced.TracedEngine) -> list[str]:
    """Methods of scheduler, runner, pool and connector that are kvproof's on this engine, and a guarded class."""
    scheduler, runner = engine.scheduler, engine.runner
    owners = [scheduler, runner, scheduler.kv_cache_manager, scheduler.kv_cache_manager.block_pool]
    owners += [scheduler.connector] if scheduler.connector is not None else []
    found = [
        f"{type(owner).__name__}.{name}"
        for owner in owners
        for name, value in vars(owner).items()
        if f"{os.sep}kvproof{os.sep}" in getattr(getattr(value, "__code__", None), "co_filename", "")
    ]
    kind = type(scheduler)
    if getattr(sys.modules[kind.__module__], kind.__name__) is not kind:
        found.append(f"class {kind.__name__}")
    return sorted(found)


def keep_async_scheduling() -> None:
    """The CPU platform switches it off whenever a config is made, a draft model's copy of it included."""
    from vllm.platforms.cpu import CpuPlatform

    native = CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        native(cls, config)
        config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check)


def _end(engine: traced.TracedEngine) -> None:
    """End an engine so that the next one of this process starts from nothing."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    engine.close()
    ensure_kv_transfer_shutdown()
    destroy_model_parallel()
    destroy_distributed_environment()


def main() -> int:
    """Play the grounds that the one argument names; ``requests`` there overrides how many each gets."""
    wanted = json.loads(sys.argv[1])
    keep_async_scheduling()
    for name, guard in wanted["grounds"]:
        ground = GROUNDS[name]
        ground = replace(ground, requests=wanted.get("requests", ground.requests))
        try:
            result = play(ground, wanted["seed"], Path(wanted["models"]), guard)
        except Exception:
            result = {"ground": name, "guard": guard, "seed": wanted["seed"], "crash": traceback.format_exc()}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    for key, value in traced.environment(os.environ.get("SOAK_RUNNER", "v1")).items():
        assert os.environ.get(key) == value, f"{key} must be {value} before Python starts"
    sys.exit(main())
