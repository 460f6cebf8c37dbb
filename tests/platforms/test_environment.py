"""What is installed is what the lock says: nothing can work here that is missing in a fresh environment."""

import runpy
import sys
from importlib.metadata import distributions, version
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent
lock = runpy.run_path(str(ROOT / "scripts" / "lock.py"))
HERE = {
    canonicalize_name(d.metadata["Name"])
    for d in distributions()
    if Path(str(d.locate_file(""))).is_relative_to(sys.prefix)
}


def the_environment():
    """The name of the lock this environment was made from: by what only that one holds."""
    if "vllm-ascend" in HERE:
        return "ascend"
    if "vllm" not in HERE:
        return "cpu"
    return "cuda-0.32" if version("vllm").startswith("0.32.") else "cuda"


def test_nothing_is_installed_beyond_the_lock():
    name = the_environment()
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    requirements = [req for line in text.splitlines() if (req := lock["requirement"](line))]
    pinned = {canonicalize_name(req.name) for req in requirements if req.marker is None or req.marker.evaluate()}
    vendored = {canonicalize_name(d.metadata["Name"]) for d in distributions() if "_vendor" in str(d.locate_file(""))}
    beyond = HERE - pinned - vendored - {"kvproof"}
    assert pinned <= HERE, f"{name}: {sorted(pinned - HERE)} not installed"
    assert not beyond, (
        f"{name}: {sorted(beyond)} would be missing in a fresh environment; uninstall, or add to {name}.in"
    )
