"""Content ids: one small integer per distinct token prefix.

The KV bytes of a token depend on that token and on everything before it. So two places hold the same content
exactly when their prefixes are equal, whatever request or block they belong to: a content id *is* the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Named:
    """First request and token position (0-based) that produced a content."""

    request: str
    token: int


class Contents:
    """Interns token prefixes as consecutive integers, in the order of first appearance."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}
        self._names: list[Named] = []

    def __len__(self) -> int:
        return len(self._names)

    def name(self, content: int) -> Named:
        """Who produced ``content`` first. ValueError for an id never given out."""
        if not 0 <= content < len(self._names):
            raise ValueError(f"content id {content} was never given out, limit {len(self._names)}")
        return self._names[content]

    def intern(self, request: str, token_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """Content ids int32 ``[len(token_ids)]`` of every prefix of ``token_ids``, from its first token on."""
        ids = np.empty(len(token_ids), np.int32)
        parent = -1
        for position, token in enumerate(token_ids):
            key = (parent, token)
            content = self._next.get(key)
            if content is None:
                content = len(self._names)
                self._next[key] = content
                self._names.append(Named(request, position))
            ids[position] = parent = content
        return ids
