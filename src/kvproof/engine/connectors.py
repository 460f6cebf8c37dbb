"""Connectors by name: presets for vLLM's own, any other by module path, and the hit rule each declares.

A hit rule says how long a hit must be for a prompt, given what was computed before. It is declared here, from the
connector's documentation and source, so that a shorter hit is a finding and a legal approximation is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvproof.findings.case import ConnectorSpec

HitRule = Callable[[list[int], list[list[int]], int], int]
"""(prompt, earlier prompts, hit unit in tokens) -> local + external hit in tokens."""

STORE_BYTES = 2 << 30
"""Host memory a connector may use for its store, in bytes."""
UCM_MODULE, UCM_CLASS = "ucm.integration.vllm.ucm_connector", "UCMConnector"
UCM_BUFFER_GIB = 1
"""Host memory UCM stages its transfers in, in GiB; the least its configuration can say."""


def full_blocks(prompt: list[int], earlier: list[list[int]], unit: int) -> int:
    """Every full block of the longest known prefix, leaving at least one token to compute."""
    best = 0
    for known in earlier:
        n = 0
        for a, b in zip(known, prompt, strict=False):
            if a != b:
                break
            n += 1
        best = max(best, n)
    return max(0, min(best, len(prompt) - 1)) // unit * unit


def stored_blocks(recomputed: int) -> HitRule:
    """UCM, AscendStore: every full block of the longest known prefix, of a whole prompt all but ``recomputed`` tokens.

    Unlike vLLM's own hits, such a hit may end inside a block.
    """

    def rule(prompt: list[int], earlier: list[list[int]], unit: int) -> int:
        stored = full_blocks([*prompt, -1], earlier, unit)
        return max(0, min(stored, len(prompt) - recomputed))

    return rule


def whole_prompts(prompt: list[int], earlier: list[list[int]], unit: int) -> int:
    """ExampleConnector: whole prompts only, stored under one key length and looked up under another.

    A prompt of n tokens is stored under its first ``(n - 1) // unit * unit`` tokens and looked up by its first
    ``(n - 2) // unit * unit``. They differ for n = k * unit + 1, which is therefore never found again (public fault:
    vLLM pull request 40684, "double off-by-one").
    """
    head = max(0, len(prompt) - 2) // unit * unit
    known = any((len(p) - 1) // unit * unit == head and p[:head] == prompt[:head] for p in earlier)
    return head if known else 0


def _example(store: str) -> dict[str, Any]:
    return {"shared_storage_path": store}


def _offloading(store: str) -> dict[str, Any]:
    del store
    return {"cpu_bytes_to_use": STORE_BYTES}


def _multi(store: str) -> dict[str, Any]:
    children = [("SimpleCPUOffloadConnector", _offloading(store)), ("OffloadingConnector", _offloading(store))]
    return {
        "connectors": [
            {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
            for name, extra in children
        ]
    }


def _ascend_store(store: str) -> dict[str, Any]:
    del store
    return {"backend": "memcache"}


def _ucm(layerwise: bool) -> Callable[[str], dict[str, Any]]:
    def config(store: str) -> dict[str, Any]:
        pipeline = {
            "store_pipeline": "Cache|Posix",
            "storage_backends": store,
            "cache_buffer_capacity_gb": UCM_BUFFER_GIB,
        }
        return {
            "ucm_connectors": [{"ucm_connector_name": "UcmPipelineStore", "ucm_connector_config": pipeline}],
            "use_layerwise": layerwise,
        }

    return config


def _ucm_has(config: dict[str, Any], blocks: int) -> bool:
    """Whether UCM's store holds ``blocks`` blocks, one file each: it writes them after it has reported a save as done.

    A file under way has ``.tmp.`` in its name, the store's own begin with a dot.
    """
    stores = [c["ucm_connector_config"].get("storage_backends", "") for c in config.get("ucm_connectors", ())]
    roots = [Path(root) for store in stores for root in store.split(":") if root]
    files = [f.relative_to(root) for root in roots for f in root.rglob("*") if f.is_file()]
    return sum(".tmp." not in f.name and not f.parts[0].startswith(".") for f in files) >= blocks


@dataclass(frozen=True)
class Profile:
    """What is declared about a connector before it runs.

    ``module_path`` is where its class is, None where vLLM registers it; ``class_name`` where it differs from the name.
    ``has_stored``: (configuration, distinct full blocks computed so far) -> whether all can be found; None where a save
    can be found as soon as its request is done.
    ``rewrites_local``: a load may write again what the local prefix cache already holds (same bytes, which the
    footprint oracle still proves). ``declared`` says the approximations in words, for the report.
    """

    extra_config: Callable[[str], dict[str, Any]]
    hit_rule: HitRule
    rewrites_local: bool = False
    declared: str = ""
    module_path: str | None = None
    class_name: str = ""
    has_stored: Callable[[dict[str, Any], int], bool] | None = None


PROFILES = {
    "ExampleConnector": Profile(
        _example,
        whole_prompts,
        True,
        "whole prompts only; a prompt of k blocks and one token is never found; loads rewrite locally cached blocks",
    ),
    "OffloadingConnector": Profile(_offloading, full_blocks),
    "SimpleCPUOffloadConnector": Profile(_offloading, full_blocks),
    "MultiConnector": Profile(_multi, full_blocks),
    "AscendStoreConnector": Profile(
        _ascend_store, stored_blocks(1), declared="of a whole prompt the last token is computed again",
    ),
    "UCM": Profile(
        _ucm(layerwise=False), stored_blocks(1), declared="of a whole prompt the last token is computed again",
        module_path=UCM_MODULE, class_name=UCM_CLASS, has_stored=_ucm_has,
    ),
    "UCMLayerwise": Profile(
        _ucm(layerwise=True), stored_blocks(2), declared="of a whole prompt the last two tokens are computed again",
        module_path=UCM_MODULE, class_name=UCM_CLASS, has_stored=_ucm_has,
    ),
}  # fmt: skip

DEFAULT_CONNECTOR = "SimpleCPUOffloadConnector"


def parse(text: str, store: str, extra: dict[str, Any] | None = None) -> ConnectorSpec:
    """``Name`` of a preset or of any connector vLLM registers, or ``package.module:Class``.

    ``extra`` replaces the preset's kv_connector_extra_config. ValueError on an empty or malformed name.
    """
    module, separator, name = text.rpartition(":")
    if not name.isidentifier() or (separator and not all(p.isidentifier() for p in module.split("."))):
        raise ValueError(f"--connector {text!r}: expected Name or package.module:Class")
    preset = PROFILES.get(name) if not module else next(iter(_profiles_of(module, name)), None)
    if preset is not None:
        module, name = preset.module_path or "", preset.class_name or name
        extra = preset.extra_config(store) if extra is None else extra
    return ConnectorSpec(name, module or None, extra or {})


def profile(spec: ConnectorSpec | None) -> Profile | None:
    """What is declared about ``spec``, or None where nobody declared anything (third-party connectors)."""
    if spec is None:
        return None
    if (spec.module_path, spec.name) == (UCM_MODULE, UCM_CLASS):
        return PROFILES["UCMLayerwise" if spec.extra_config.get("use_layerwise", True) else "UCM"]
    return None if spec.module_path is not None else PROFILES.get(spec.name)


def _profiles_of(module: str, name: str) -> list[Profile]:
    return [p for p in PROFILES.values() if (p.module_path, p.class_name) == (module, name)]
