"""Write requirements/NAME.lock: the direct requirements of NAME.in and all they need, as installed right here.

    .venv/bin/python scripts/lock.py             (cpu)
    .venv-cuda/bin/python scripts/lock.py cuda
    .venv-cuda-0.32/bin/python scripts/lock.py cuda-0.32     (the same list, an older vLLM)
    .venv-ascend/bin/python scripts/lock.py ascend

Nothing is resolved. The lock is a photograph of an environment that works, without whatever else lies in it.
"""

import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS = Path(__file__).parent.parent / "requirements"
NAMES = ("cpu", "cuda", "cuda-0.32", "ascend")
NAME = sys.argv[1] if sys.argv[1:] and sys.argv[1] in NAMES else "cpu"
KIND = NAME.partition("-")[0]
SOURCE, LOCK = REQUIREMENTS / f"{KIND}.in", REQUIREMENTS / f"{NAME}.lock"

# Asked for, not importable beside the CPU torch or without the device, and not needed.
LEFT_OUT = {
    "cpu": frozenset({"torchaudio", "torchcodec", "torchvision"}),
    "cuda": frozenset[str](),
    "ascend": frozenset(
        {"arctic-inference", "fastokens", "memcache-hybrid", "memfabric-hybrid", "pandas-stubs",
         "torchaudio", "torchcodec", "triton-ascend"}
    ),
}[KIND]  # fmt: skip

HEADER = f"# Written by scripts/lock.py from {KIND}.in. Complete: install with --no-deps, nothing is left to resolve.\n"
if LEFT_OUT:
    HEADER += f"# Left out on purpose: {', '.join(sorted(LEFT_OUT))} (not importable here, not needed).\n"


def requirement(line: str) -> Requirement | None:
    """The requirement on a line of a requirements file, or None where it carries only a comment."""
    text = line.partition("#")[0].strip()
    return Requirement(text) if text else None


def needs(dist: Distribution, extras: frozenset[str]) -> Iterator[Requirement]:
    """What an installed distribution needs on this machine."""
    for req in map(Requirement, dist.requires or []):
        if req.marker is None or any(req.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            yield req


def closure(direct: list[Requirement], installed: dict[str, Distribution]) -> set[str]:
    """The names of the direct requirements and of everything they lead to."""
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = list(direct)
    while todo:
        req = todo.pop()
        name, extras = canonicalize_name(req.name), frozenset(req.extras)
        if name in LEFT_OUT or (name, extras) in seen:
            continue
        if name not in installed:
            raise SystemExit(f"lock: {req.name} is needed but not installed here")
        seen.add((name, extras))
        todo += needs(installed[name], extras)
    return {name for name, _ in seen}


def render() -> str:
    """The text of the lock for the environment this runs in."""
    installed: dict[str, Distribution] = {}
    for dist in distributions():
        # The first one counts, as it does for import: setuptools appends a folder of its own copies to the path.
        installed.setdefault(canonicalize_name(dist.metadata["Name"]), dist)
    lines, direct, by_hand = [], [], set()
    for line in SOURCE.read_text().splitlines()[2:]:  # after the note to whoever edits it
        req = requirement(line)
        if req and req.specifier:
            by_hand.add(canonicalize_name(req.name))
        elif req:
            direct.append(req)
            line = pin(installed, canonicalize_name(req.name))
        lines.append(line)
    rest = closure(direct, installed) - by_hand - {canonicalize_name(req.name) for req in direct}
    lines += ["", "# what those need", *(pin(installed, name) for name in sorted(rest))]
    return HEADER + "\n" + "\n".join(lines) + "\n"


def pin(installed: dict[str, Distribution], name: str) -> str:
    if name not in installed:
        raise SystemExit(f"lock: {name} stands in {SOURCE.name} but is not installed here")
    return f"{name}=={installed[name].version}"


if __name__ == "__main__":
    LOCK.write_text(render())
