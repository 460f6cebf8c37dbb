"""Child processes: the environment must be right before Python starts, and a connector may end its process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvproof.engine import temporary
from kvproof.engine.staging import environment
from kvproof.findings.case import Case
from kvproof.findings.text import PROGRESS
from kvproof.platforms import ucm
from kvproof.platforms.declaration import declared
from kvproof.platforms.registry import platform


@dataclass(frozen=True)
class Watched:
    """How a child ended: exit code (negative: signal), its last progress, and every line it printed."""

    returncode: int
    last: str
    lines: tuple[str, ...]

    @property
    def how(self) -> str:
        """The exit code in words."""
        return f"signal {-self.returncode}" if self.returncode < 0 else f"exit code {self.returncode}"


def watch(module: str, arguments: Sequence[str], case: Case, progress: Callable[[str], None]) -> Watched:
    """:func:`follow` with the environment and the declarations of ``case``."""
    if not platform(case.platform).declares:
        return follow(module, arguments, environment(case), progress)
    with declared(case) as extra:
        return follow(module, arguments, {**environment(case), **extra}, progress)


def follow(module: str, arguments: Sequence[str], extra: Mapping[str, str], progress: Callable[[str], None]) -> Watched:
    """Run ``python -m module arguments`` with ``extra`` environment, relay its progress, wait for its end.

    It has a temporary directory of its own, and nothing of it is left. It is killed, with every process it started,
    when the caller is interrupted.
    """
    with temporary.own_directory() as own:
        child = subprocess.Popen(
            [sys.executable, "-u", "-m", module, *arguments],
            env={**os.environ, **own, **extra},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,  # an interrupt from the terminal is ours to pass on
        )
        lines, last = [], "start"
        try:
            for line in child.stdout or ():
                lines.append(line)
                if line.startswith(PROGRESS):
                    last = line.removeprefix(PROGRESS).strip()
                    progress(last)
            child.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
        finally:
            # A worker inside of the engine's process takes this one, its parent, for the engine.
            ucm.remove_published(child.pid, os.getpid())
    return Watched(child.returncode, last, tuple(lines))
