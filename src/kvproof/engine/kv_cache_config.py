"""vLLM's KVCacheConfig as plain JSON: the plan as vLLM states it, beside the layout read off the tensors."""

from __future__ import annotations

import dataclasses
from enum import Enum
from fractions import Fraction
from typing import Any


def snapshot(config: Any) -> dict[str, Any]:
    """Every field of a KVCacheConfig: groups, specs, tensors with their sizes and strides in bytes.

    Names and order are vLLM's. An object that is no data (a callable, say) becomes the name of its class.
    """
    plain: dict[str, Any] = _plain(config)
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):  # before str and int: vLLM's enums are often both
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        # What vLLM derives from a spec's fields decides how many bytes a block takes.
        page = {"page_size_bytes": value.page_size_bytes} if hasattr(value, "page_size_bytes") else {}
        return {"class": type(value).__name__, **fields, **page}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, Fraction) or type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    return type(value).__name__
