"""MemCache's client, as vllm-ascend's pool connector uses it, over a pool that is host memory of this process.

``memcache_hybrid`` is compiled code that refuses to start without an Ascend driver. Which bytes go under which key, and
where they come from and go to, is vllm-ascend's own: its lists of keys, addresses and sizes are executed as they are,
by the one host copier. Whether a key is there, and what is answered when it is not, is as MemCache 1.3.0 does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvproof.platforms.hostcopy import HOST_COPIER, CopyBatch

STORED = 0
MISSING, OTHER_SIZE = -3007, -3012
"""MemCache's codes for a key nobody stored, and for one that was stored with another number of bytes."""

_POOL: dict[str, npt.NDArray[np.uint8]] = {}
"""Shared by all clients of a process, as a pool is."""


class DistributedObjectStore:
    """A client of the pool, for whole blocks. Anything else is missing and says so when it is asked for."""

    def init(self, device_id: int, init_bm: bool = True) -> int:
        """The scheduler's client brings no memory (``init_bm=False``); here neither does."""
        del device_id, init_bm
        return STORED

    def register_buffer(self, address: int, nbytes: int) -> int:
        """Addresses are checked when they are used, against vLLM's tables."""
        del address, nbytes
        return STORED

    def unregister_buffer(self, address: int, nbytes: int) -> int:
        del address, nbytes
        return STORED

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        return [int(key in _POOL) for key in keys]

    def batch_put_from_layers(
        self, keys: Sequence[str], addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]], direction: int
    ) -> list[int]:
        """A key that is there already keeps what it has."""
        del direction
        new: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
        for key, parts, nbytes in zip(keys, addresses, sizes, strict=True):
            if key not in _POOL:
                new.setdefault(key, (parts, nbytes))
        objects = {key: np.zeros(sum(nbytes), np.uint8) for key, (_, nbytes) in new.items()}
        _copy([move for key, (parts, nbytes) in new.items() for move in _moves(parts, objects[key], nbytes)])
        _POOL.update(objects)
        return [STORED] * len(keys)

    def batch_get_into_layers(
        self, keys: Sequence[str], addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]], direction: int
    ) -> list[int]:
        del direction
        answers: list[int] = []
        moves: list[tuple[int, int, int]] = []
        for key, parts, nbytes in zip(keys, addresses, sizes, strict=True):
            stored = _POOL.get(key)
            answers.append(MISSING if stored is None else STORED if stored.nbytes == sum(nbytes) else OTHER_SIZE)
            if stored is not None and answers[-1] == STORED:
                moves += _moves(parts, stored, nbytes)
        _copy([(pool, kv, size) for kv, pool, size in moves])
        return answers

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"kvproof ascend-sim: memcache_hybrid.{type(self).__name__}.{name} has no host twin")


def _moves(parts: Sequence[int], stored: npt.NDArray[np.uint8], sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(address of a part, its place in the object, bytes): the parts of an object stand in it one behind the other."""
    at = stored.ctypes.data
    for part, size in zip(parts, sizes, strict=True):
        yield part, at, size
        at += size


def _copy(moves: list[tuple[int, int, int]]) -> None:
    """(source, target, bytes), as one batch."""
    if moves:
        sources, targets, sizes = zip(*moves, strict=True)
        HOST_COPIER.copy(
            CopyBatch(np.array(sources, np.uint64), np.array(targets, np.uint64), np.array(sizes, np.int64))
        )
