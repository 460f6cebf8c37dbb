"""Host copies in place of device copies: the same (source, target, size) lists, moved by ``memmove``.

Every batch passes the ``taps`` first. A tap sees the batch and returns the batch to execute: the recorder of claims
returns it unchanged (minus addresses that lie nowhere, which would end the process), a planted fault changes it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

AddressArray = npt.NDArray[np.uint64]


_UNSAID = np.empty(0, np.bool_)


@dataclass(frozen=True)
class CopyBatch:
    """``sources[i] -> targets[i]``, ``sizes[i]`` bytes; addresses uint64, sizes in bytes.

    ``reads[i]`` is True where the caller says that the source is the device's; False throughout where nobody said so.
    """

    sources: AddressArray
    targets: AddressArray
    sizes: npt.NDArray[np.int64]
    reads: npt.NDArray[np.bool_] = field(default_factory=lambda: _UNSAID)

    def __post_init__(self) -> None:
        if self.reads is _UNSAID:
            object.__setattr__(self, "reads", np.zeros(len(self.sizes), np.bool_))
        if not len(self.sources) == len(self.targets) == len(self.sizes) == len(self.reads):
            raise ValueError(
                f"copy lists differ in length: {len(self.sources)}, {len(self.targets)}, {len(self.sizes)}"
            )

    @staticmethod
    def of_tensors(sources: Any, targets: Any, sizes: Any) -> CopyBatch:
        """From tensors of addresses and sizes [B], on whatever device they are."""
        columns = [tensor.cpu().numpy() for tensor in (sources, targets, sizes)]
        return CopyBatch(columns[0].astype(np.uint64), columns[1].astype(np.uint64), columns[2].astype(np.int64))

    @staticmethod
    def of_arrays(sources: int, targets: int, sizes: int, count: int) -> CopyBatch:
        """From the addresses of three arrays of ``count`` uint64 each: addresses and sizes [B]."""

        def array(address: int) -> AddressArray:
            return np.ctypeslib.as_array((ctypes.c_uint64 * count).from_address(address)).copy()

        return CopyBatch(array(sources), array(targets), array(sizes).astype(np.int64))


class HostCopier:
    """Executes copy batches on host memory."""

    def __init__(self) -> None:
        self.taps: list[Callable[[CopyBatch], CopyBatch]] = []
        self.batches = 0
        self.bytes = 0

    def copy(self, batch: CopyBatch) -> None:
        for tap in self.taps:
            batch = tap(batch)
        for source, target, size in zip(
            batch.sources.tolist(), batch.targets.tolist(), batch.sizes.tolist(), strict=True
        ):
            ctypes.memmove(target, source, size)
        self.batches += 1
        self.bytes += int(batch.sizes.sum())

    def show(self, batch: CopyBatch) -> None:
        """Let the taps see a batch that the device itself executes; what they answer changes nothing."""
        for tap in self.taps:
            tap(batch)
        self.batches += 1
        self.bytes += int(batch.sizes.sum())


HOST_COPIER = HostCopier()
"""The one copier of this process; the stand-ins below have no other way to reach it."""
