"""Writes logs as the guard writes them: a small engine on paper, with one group of 16-token blocks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvproof.cli import trace

ENGINE = "c0ffee00"
START = 1_760_000_000.0
BLOCK = 16
BLOCKS = 64
HOST = "node-1"
SCHEDULER, WORKER = f"kv_trace-scheduler-{HOST}-100.jsonl", f"kv_trace-worker-{HOST}-200.jsonl"

RULE = "write_target_mismatch"


class Engine:
    """One scheduler and one worker. ``step`` plays a step; the lines are kept per role until ``save``."""

    def __init__(self, engine: str = ENGINE, start: float = START):
        self.engine, self.now, self.number = engine, start, 0
        self.lines: dict[str, list[dict[str, Any]]] = {"scheduler": [], "worker": []}
        self.rows: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.free = list(range(1, BLOCKS))
        self.gone: list[str] = []
        self.put_off: list[str] = []
        for role in self.lines:
            self.enabled(role)

    def emit(self, role: str, event: str, step: int | None = None, **fields: Any) -> None:
        """One line."""
        self.now = round(self.now + 0.001, 6)
        self.lines[role].append({
            "event": event, "time": self.now, "role": role, "pid": 100 if role == "scheduler" else 200, "rank": 0,
            "engine": self.engine, "step": step, "trace": None if step is None else f"{self.engine}-{step}", **fields,
        })  # fmt: skip

    def enabled(self, role: str, **counters: Mapping[str, int]) -> None:
        scheduler = role == "scheduler"
        self.emit(
            role, "kv.enabled", kvproof="0.1.0", vllm="0.32.0", runner=None if scheduler else "GPUModelRunner",
            scheduler="Scheduler" if scheduler else None, action="log", options={"enabled": True},
            rules=["sched_total_mismatch"] if scheduler else [RULE, "read_block_table_mismatch"],
            skipped={} if scheduler else {"dcp_local_slot_mismatch": "no decode context parallelism"},
            groups=[
                {"index": 0, "kind": "full", "block_size": BLOCK, "num_blocks": BLOCKS, "window": None, "layers": 2}
            ],
            parallel={"dcp_size": 1, "dcp_rank": 0, "pcp_size": 1, "pcp_rank": 0, "interleave": 1},
            connector="OffloadingConnector", async_scheduling=False, counters=counters,
        )  # fmt: skip

    def counters(self, role: str, **counters: Mapping[str, int] | int) -> None:
        self.emit(role, "boundary", self.number, kind="counters", counters=counters)

    def boundary(self, kind: str, role: str = "scheduler", **fields: Any) -> None:
        self.emit(role, "boundary", self.number or None, kind=kind, **fields)

    def allocate(self, request: str, count: int) -> list[int]:
        blocks, self.free = self.free[:count], self.free[count:]
        self.emit(
            "scheduler", "kv.alloc", self.number, request=request, action="alloc", blocks=blocks, free=len(self.free)
        )
        return blocks

    def release(self, request: str) -> None:
        blocks = self.rows.pop(request)[::-1]
        self.free += blocks
        self.emit(
            "scheduler", "kv.release", self.number, request=request, blocks=blocks, freed=blocks, free=len(self.free)
        )

    def finish(self, request: str, delayed: bool = False) -> None:
        """The request has ended; the next step declares it."""
        self.boundary("finished", request=request, delayed=delayed)
        self.release(request)
        self.gone.append(request)

    def preempt(self, request: str) -> None:
        """The request loses its blocks; the next step declares it."""
        self.release(request)
        self.put_off.append(request)
        self.computed[request] = 0

    def step(
        self,
        tokens: Mapping[str, int],
        new: Sequence[str] = (),
        resumed: Sequence[str] = (),
        drafts: Mapping[str, int] | None = None,
        wrong: Mapping[str, int] | None = None,
        written: bool = True,
        result: bool = True,
    ) -> None:
        """One step. ``wrong`` gives requests another slot than the right one."""
        self.number += 1
        requests, declared = list(tokens), []
        starts = [self.computed.setdefault(request, 0) for request in requests]
        for index, request in enumerate(requests):
            row = self.rows.setdefault(request, [])
            # A request that was loaded has its row before its first step: all of it is declared as new.
            first = 0 if request in (*new, *resumed) else len(row)
            needed = -(-(starts[index] + tokens[request]) // BLOCK) - len(row)
            if needed > 0:
                row += self.allocate(request, needed)
            if row[first:]:
                declared.append([index, 0, first, row[first:]])
        self.emit(
            "scheduler", "kv.bind", self.number, requests=requests, tokens=list(tokens.values()), start=starts,
            drafts=[(drafts or {}).get(request, 0) for request in requests], total=sum(tokens.values()), budget=64,
            new=list(new), resumed=list(resumed), finished=self.gone, preempted=self.put_off, blocks=declared, digest=7,
        )  # fmt: skip
        self.gone, self.put_off = [], []
        if written and tokens:
            self._worker(requests, tokens, starts, wrong or {}, {entry[0]: entry for entry in declared})
        for request, count in tokens.items():
            self.computed[request] += count
        if result:
            self.now += 0.005
            self.boundary("result", requests=requests, sampled=[1] * len(requests))

    def _worker(
        self, requests: list[str], tokens: Mapping[str, int], starts: list[int], wrong: Mapping[str, int],
        grown: Mapping[int, list[Any]],
    ) -> None:  # fmt: skip
        runs, total = [], sum(tokens.values())
        for index, request in enumerate(requests):
            if request in wrong:
                runs.append([index, wrong[request], tokens[request]])
                continue
            place, end = starts[index], starts[index] + tokens[request]
            while place < end:
                stop = min(end, (place // BLOCK + 1) * BLOCK)
                runs.append([index, self.rows[request][place // BLOCK] * BLOCK + place % BLOCK, stop - place])
                place = stop
        self.emit(
            "worker", "kv.write", self.number, requests=requests, tokens=list(tokens.values()), positions=starts,
            num_tokens=total, padded=total + 1, groups=[{"group": 0, "runs": runs}],
        )  # fmt: skip
        self.emit(
            "worker", "kv.read", self.number, requests=requests, whole=False,
            seq_lens=[start + count for start, count in zip(starts, tokens.values(), strict=True)],
            groups=[{"group": 0, "blocks": [[index, entry[2], entry[3]] for index, entry in grown.items()]}],
        )  # fmt: skip

    def violation(self, request: str | None = None, rule: str = RULE, role: str = "worker", **place: Any) -> None:
        fields = {
            "family": "write", "boundary": "write", "request": request, "group": 0, "block": None, "slot": None,
            "position": None, "expected": "slot 90", "found": "slot 58", "action": "log", **place,
        }  # fmt: skip
        where = f"request {request}" if request else "the whole step"
        message = f"{rule}: {where}: expected {fields['expected']}, found {fields['found']}"
        self.emit(role, "kv.violation", self.number, rule=rule, message=message, **fields)

    def error(self, role: str = "worker", **fields: Any) -> None:
        self.emit(role, "kv.error", self.number, **{
            "where": "execute_model", "type": "RuntimeError", "message": "out of memory", "guard": False,
            "traceback": ["runner.py:10 execute_model"], **fields,
        })  # fmt: skip

    def save(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        for role, name in (("scheduler", SCHEDULER), ("worker", WORKER)):
            (directory / name).write_text("".join(line(event) for event in self.lines[role]))
        return directory


def line(event: Mapping[str, Any]) -> str:
    """One event as the guard writes it."""
    return json.dumps(event, separators=(",", ":")) + "\n"


def clean(directory: Path) -> Path:
    """Two requests, prefilled in chunks and decoded side by side; nothing wrong."""
    engine = Engine()
    _prefill(engine)
    for _ in range(6):
        engine.step({"req-a": 1, "req-b": 1})
    engine.finish("req-a")
    engine.step({"req-b": 1})
    _counters(engine)
    return engine.save(directory)


def violated(directory: Path) -> Path:
    """Beside the two, a load from outside, a preemption, a delayed save; in step 9 the worker writes req-b's token into
    block 3, which is req-a's."""
    engine = Engine()
    _prefill(engine)
    engine.step({"req-a": 1, "req-b": 1})
    engine.boundary("match", request="req-c", matched=32, is_async=True, local=0, total=40)
    engine.rows["req-c"] = engine.allocate("req-c", 2)
    engine.computed["req-c"] = 32
    engine.boundary("load_target", request="req-c", external=32, local=0, blocks=[list(engine.rows["req-c"])])
    engine.step({"req-a": 1, "req-b": 1})
    engine.step({"req-a": 1, "req-b": 1})
    engine.boundary("transfers", finished_sending=[], finished_recving=["req-c"], failed_recving=[], invalid_blocks=[])
    engine.step({"req-a": 1, "req-b": 1, "req-c": 8}, new=["req-c"])
    engine.preempt("req-c")
    engine.step({"req-a": 1, "req-b": 1})
    engine.step({"req-a": 1, "req-b": 1, "req-c": 40}, resumed=["req-c"])
    engine.step({"req-a": 1, "req-b": 1, "req-c": 1}, wrong={"req-b": 3 * BLOCK + 10}, result=False)
    engine.violation("req-b", slot=3 * BLOCK + 10, position=26)
    engine.boundary("result", requests=["req-a", "req-b", "req-c"], sampled=[1, 1, 1])
    engine.finish("req-a", delayed=True)
    engine.step({"req-b": 1, "req-c": 1})
    engine.boundary("transfers", finished_sending=["req-a"], finished_recving=[], failed_recving=[], invalid_blocks=[])
    engine.step({"req-b": 1, "req-c": 1})
    _counters(engine, **{RULE: 1})
    return engine.save(directory)


def _prefill(engine: Engine) -> None:
    engine.step({"req-a": 32}, new=["req-a"])
    engine.step({"req-a": 8, "req-b": 20}, new=["req-b"])


def _counters(engine: Engine, **violations: int) -> None:
    engine.counters("scheduler", judged={"Schedule": 1}, fast={"Schedule": engine.number - 1})
    engine.counters(
        "worker", judged={"Plan": engine.number}, skipped={"pcp_partition_mismatch": engine.number},
        violations=violations, dropped=0, guard_failures={},
    )  # fmt: skip


def command(*arguments: str | Path) -> int:
    """``kvproof trace`` with these arguments; its exit code."""
    parser = argparse.ArgumentParser(prog="kvproof")
    trace.add_parser(parser.add_subparsers(dest="command", required=True))
    args = parser.parse_args(["trace", *map(str, arguments)])
    code: int = args.run(args)
    return code
