"""Connectors by name: presets for vLLM's own, any other by module path, and the hit rule each declares.

A hit rule says how long a hit must be for a prompt, given what was computed before. It is declared here, from the
connector's documentation and source, so that a shorter hit is a finding and a legal approximation is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvproof.findings.case import ConnectorSpec

HitRule = Callable[[list[int], list[list[int]], int], int]
"""(prompt, earlier prompts, hit unit in tokens) -> local + external hit in tokens."""

STORE_BYTES = 2 << 30
"""Host memory a connector may use for its store, in bytes."""


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
    return min(best, len(prompt) - 1) // unit * unit


def whole_prompts(prompt: list[int], earlier: list[list[int]], unit: int) -> int:
    """ExampleConnector: a prompt is known by its head up to the last full block before its last-but-one token.

    The head of n tokens is ``(n - 2) // unit * unit`` long; nothing shorter and nothing longer is ever found. (For
    n = k * unit + 1 this is one block less than possible; vLLM pull request 40684 describes it.)
    """
    head = (len(prompt) - 2) // unit * unit
    known = any((len(p) - 2) // unit * unit == head and p[:head] == prompt[:head] for p in earlier)
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


PRESETS: dict[str, tuple[Callable[[str], dict[str, Any]], HitRule]] = {
    "ExampleConnector": (_example, whole_prompts),
    "OffloadingConnector": (_offloading, full_blocks),
    "SimpleCPUOffloadConnector": (_offloading, full_blocks),
    "MultiConnector": (_multi, full_blocks),
}
"""Name -> (extra config for a store directory, declared hit rule)."""

DEFAULT_CONNECTOR = "SimpleCPUOffloadConnector"


def parse(text: str, store: str, extra: dict[str, Any] | None = None) -> ConnectorSpec:
    """``Name`` of a preset or of any connector vLLM registers, or ``package.module:Class``.

    ``extra`` replaces the preset's kv_connector_extra_config. ValueError on an empty or malformed name.
    """
    module, separator, name = text.rpartition(":")
    if not name.isidentifier() or (separator and not all(p.isidentifier() for p in module.split("."))):
        raise ValueError(f"--connector {text!r}: expected Name or package.module:Class")
    if extra is None:
        extra = PRESETS[name][0](store) if name in PRESETS and not module else {}
    return ConnectorSpec(name, module or None, extra)


def hit_rule(spec: ConnectorSpec | None) -> HitRule | None:
    """Declared rule, or None where nobody declared one."""
    if spec is None or spec.module_path is not None or spec.name not in PRESETS:
        return None
    return PRESETS[spec.name][1]
