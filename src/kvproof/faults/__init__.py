"""Planted faults: the catalogue, and the proof that each one is caught."""

from __future__ import annotations

from typing import Any


def plant(name: str, staged: Any) -> Any:
    raise NotImplementedError
