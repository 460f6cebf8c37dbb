"""What one configuration costs without its device: from the start of the command to its verdict, and its memory.

    python benchmarks/platforms.py [--only TEXT]

Needs `make env-cuda env-ascend`. Each row is a whole `kvproof check`, all modes, 512 tokens. "memory" is the largest
resident size of a process of the run. Run it on a machine that does nothing else. Nothing asserts: a figure that misses
its target is printed as missed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
SECONDS, GIBIBYTES = 60, 6
"""The targets of one configuration on 2 idle cores."""

CUDA, ASCEND = ("cuda", "--platform", "cuda-sim"), ("ascend", "--platform", "ascend-sim", "--soc", "ascend910b")
RINGS = ("--engine-args", '{"prefix_match_unit": 32}')
CASES = [
    ("qwen3-0.6b", CUDA, ("--cuda-capability", "9.0", "--runner", "v1")),
    ("gemma-3-1b", CUDA, ("--cuda-capability", "10.0", "--connector", "OffloadingConnector")),
    ("gpt-oss-20b", CUDA, ("--cuda-capability", "9.0", "--connector", "OffloadingConnector")),
    ("deepseek-v3.2", CUDA, ("--cuda-capability", "9.0", "--connector", "OffloadingConnector")),
    ("tiny-qwen3-next", CUDA, ("--cuda-capability", "9.0", "--connector", "OffloadingConnector")),
    ("granite-4.0-h-tiny", CUDA, ("--cuda-capability", "9.0", "--connector", "OffloadingConnector")),
    ("deepseek-v4-flash", CUDA, ("--cuda-capability", "9.0", "--connector", "OffloadingConnector")),
    ("deepseek-v4.1", CUDA, ("--cuda-capability", "9.0", "--runner", "v2")),
    ("deepseek-v4.1", CUDA, ("--cuda-capability", "10.0", "--runner", "v2")),
    ("tiny-deepseek-v3", CUDA, ("--cuda-capability", "9.0", "--connector", "UCMLayerwise")),
    ("qwen3-0.6b", ASCEND, ("--runner", "v1")),
    ("gemma-3-1b", ASCEND, ("--runner", "v2", "--connector", "OffloadingConnector")),
    ("deepseek-v3.2", ASCEND, ("--runner", "v2")),
    ("deepseek-v4.1", ASCEND, ("--runner", "v2", *RINGS)),
    ("deepseek-v4.1", ASCEND, ("--runner", "v2", "--connector", "AscendStoreConnector", *RINGS)),
    ("tiny-deepseek-v3", ASCEND, ("--runner", "v1", "--connector", "UCM")),
]


def measure(model: str, platform: tuple[str, ...], options: tuple[str, ...]) -> tuple[int, float, float]:
    """Exit code, seconds and GiB of one command."""
    environment, *declared = platform
    kvproof, silent = ROOT / f".venv-{environment}" / "bin" / "kvproof", subprocess.DEVNULL
    command = [kvproof, "check", model, *declared, *options, "--tokens", "512"]
    start = time.monotonic()
    with subprocess.Popen(command, stdout=silent, stderr=silent, stdin=silent) as run:
        _, status, used = os.wait4(run.pid, 0)
        run.returncode = os.waitstatus_to_exitcode(status)
    return run.returncode, time.monotonic() - start, used.ru_maxrss / (1 << 20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose command has this text in it")
    only = parser.parse_args().only
    limits = f"seconds (≤ {SECONDS})", f"memory, GiB (≤ {GIBIBYTES})"
    table = Table("model", "platform", "options", "exit code", *limits, "target")
    console, missed = Console(), 0
    for model, platform, options in CASES:
        words = " ".join((model, *platform[1:], *options))
        if only not in words:
            continue
        console.print(f"[dim]{words}")
        code, seconds, memory = measure(model, platform, options)
        met = code == 0 and seconds <= SECONDS and memory <= GIBIBYTES
        missed += not met
        figures = str(code), f"{seconds:.0f}", f"{memory:.1f}", "met" if met else "MISSED"
        table.add_row(model, platform[2], " ".join(options), *figures)
    console.print(table, width=150)
    console.print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
