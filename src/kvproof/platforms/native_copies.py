"""Copies that compiled code asks of a stand-in runtime library: carried out there, collected here afterwards.

They never pass the host copier, so nobody in Python sees them before they happen. The library refuses what would leave
the memory declared to it, and records every copy that touches that memory, refused ones included.
"""

from __future__ import annotations

import ctypes

import numpy as np

from kvproof.platforms.hostcopy import CopyBatch

_FIELDS = 4
"""uint64 words of a record (``KvproofCopy`` in hostrt/copies.h): source, target, bytes, kind."""
_DEVICE_TO_HOST = 2
_AT_ONCE = 4096
"""Records taken in one call."""


class NativeCopies:
    """The records of one library, named as the dynamic linker finds it. OSError where it is not there."""

    def __init__(self, library: str) -> None:
        loaded = ctypes.CDLL(library)
        self._declare, self._collect = loaded.kvproof_declare, loaded.kvproof_collect
        self._declare.argtypes, self._declare.restype = (ctypes.c_void_p, ctypes.c_size_t), None
        self._collect.argtypes, self._collect.restype = (ctypes.c_void_p, ctypes.c_size_t), ctypes.c_size_t

    def declare(self, address: int, nbytes: int) -> None:
        """``nbytes`` at ``address`` are device memory from now on, and copies that touch them are recorded."""
        self._declare(address, nbytes)

    def collect(self) -> CopyBatch:
        """Copies since the last call, in the order they ended."""
        records = np.empty((0, _FIELDS), np.uint64)
        while True:
            more = np.empty((_AT_ONCE, _FIELDS), np.uint64)
            count = self._collect(more.ctypes.data, _AT_ONCE)
            records = np.concatenate([records, more[:count]])
            if count < _AT_ONCE:
                break
        sources, targets, sizes, kinds = (column.copy() for column in records.T)
        return CopyBatch(sources, targets, sizes.astype(np.int64), kinds == _DEVICE_TO_HOST)
