"""Reaching every process of a running engine: a throw-away plugin directory and the environment beside it."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvproof.engine.staging import MODELS
from kvproof.findings.model import Substitution
from kvproof.oracles.engine_answers import EngineCase

PLUGIN = "kvproof_stand_ins"


def install_stand_ins() -> list[Substitution]:
    """The vLLM plugin: runs in each process of the engine before a connector is constructed there."""
    # vLLM's CPU worker replaces torch's streams and events when this module is imported, which it wants to be
    # first; imported now, it cannot undo the stand-ins later.
    import vllm.v1.worker.cpu.shm  # noqa: F401

    from kvproof.platforms import cpu

    return list(cpu.install())


def _write_companion(directory: Path, runner: str) -> None:
    """Write a throw-away distribution whose entry points vLLM and Triton find in every process.

    The CPU platform forces the spawn start method, so patches made here do not travel; entry points do,
    because the search path travels. It is vLLM's own plugin interface (and Triton's own backend interface),
    and installing kvproof changes no other vLLM on this machine.
    """
    points = f"[vllm.general_plugins]\n{PLUGIN} = kvproof.engine.companion:install_stand_ins\n"
    if runner == "v2":
        points += "[triton.backends]\ncpu = kvproof_triton_cpu\n"
        package = directory / "kvproof_triton_cpu"
        package.mkdir()
        (package / "__init__.py").write_text("")
        for module, base in (("driver", "DriverBase"), ("compiler", "BaseBackend")):
            (package / f"{module}.py").write_text(_TRITON_MODULE.format(module=module, base=base))
    info = directory / "kvproof_companion-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvproof-companion\nVersion: 0\n")
    (info / "entry_points.txt").write_text(points)


_TRITON_MODULE = '''"""Tells vLLM that Triton runs on this CPU; its interpreter does."""
import triton.backends.{module} as base


class Interpreted(base.{base}):
    @staticmethod
    def is_active():
        return True


Interpreted.__abstractmethods__ = frozenset()
'''


@contextmanager
def surroundings(case: EngineCase) -> Iterator[None]:
    """Environment and search path of the engine's processes; they only count before vLLM is imported."""
    if "vllm" in sys.modules:
        raise RuntimeError("run() must come before vLLM is imported here; ask() starts a fresh process")
    with tempfile.TemporaryDirectory(prefix="kvproof-engine-") as companion:
        _write_companion(Path(companion), case.runner)
        os.environ.update(
            VLLM_PLUGINS=f"{PLUGIN},{MODELS}",
            VLLM_ENABLE_V1_MULTIPROCESSING="1" if case.multiprocess else "0",
            VLLM_USE_V2_MODEL_RUNNER="1" if case.runner == "v2" else "0",
            VLLM_LOGGING_STREAM="ext://sys.stderr",
            VLLM_NO_USAGE_STATS="1",
            HF_HUB_OFFLINE="1",
            PYTHONHASHSEED="0",  # connectors hash with Python's hash(); their processes must agree
            PYTHONPATH=os.pathsep.join(filter(None, [companion, os.environ.get("PYTHONPATH", "")])),
        )
        # A tiny model gains nothing from threads, and threads that spin while they wait cost minutes on a
        # busy machine.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if case.runner == "v2":
            os.environ["TRITON_INTERPRET"] = "1"
        sys.path.insert(0, companion)
        try:
            yield
        finally:
            sys.path.remove(companion)
