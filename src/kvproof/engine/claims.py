"""What a connector does to KV memory, seen from outside: its copy lists and its torch operations.

Both are resolved to blocks here. Whether those blocks were allowed is for the legality oracle to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvproof.layout import Layout
from kvproof.layout.frames import FrameFamily, frame_families
from kvproof.platforms.hostcopy import CopyBatch


@dataclass
class Access:
    """One call's accesses to KV memory. ``write`` is True where KV memory is the target."""

    write: bool
    via: str
    addresses: int
    nbytes: int
    blocks: set[int]
    outside: int = 0
    crossing: int = 0
    first_illegal: str = ""
    starts: dict[int, tuple[int, int]] = field(default_factory=dict)  # block -> (storage, byte) first used


class AddressMap:
    """Resolves addresses to (storage, frame family, block)."""

    def __init__(self, layout: Layout, bases: list[int]) -> None:
        self.layout = layout
        self.bases = bases
        self.sizes = [s.nbytes for s in layout.storages]
        self.families: list[FrameFamily] = list(frame_families(layout))

    def storage_of(self, address: int) -> int | None:
        for index, (base, size) in enumerate(zip(self.bases, self.sizes, strict=True)):
            if base <= address < base + size:
                return index
        return None

    def resolve(
        self, addresses: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """(inside KV memory, block id or -1, range leaves its page), one entry per address.

        A range that covers whole neighbouring pages of one block id (block-outermost layouts) is not crossing.
        """
        inside = np.zeros(addresses.shape, np.bool_)
        block = np.full(addresses.shape, -1, np.int64)
        crossing = np.zeros(addresses.shape, np.bool_)
        starts = addresses.astype(np.int64)
        for storage, (base, size) in enumerate(zip(self.bases, self.sizes, strict=True)):
            here = (starts >= base) & (starts < base + size)
            inside |= here
            offset = starts - base
            for family in self.families:
                if family.storage != storage:
                    continue
                relative = offset - family.offset
                index = relative // family.block_stride
                rest = relative - index * family.block_stride
                hit = here & (relative >= 0) & (index < self.layout.num_blocks) & (rest < family.nbytes)
                block[hit] = index[hit]
                limit = family.nbytes if self._layer_outermost(family) else family.block_stride
                crossing[hit] = (rest + sizes > limit)[hit]
        return inside, block, crossing

    def _layer_outermost(self, family: FrameFamily) -> bool:
        return family.block_stride == family.nbytes


class CopyRecorder:
    """A tap of the host copier: reports every batch that touches KV memory, drops what lies nowhere in it.

    An address just past KV memory would end the process or corrupt it, so such copies are counted and not executed.
    """

    def __init__(self, addresses: AddressMap, report: Callable[[Access], None]) -> None:
        self._map = addresses
        self._report = report

    def __call__(self, batch: CopyBatch) -> CopyBatch:
        source_in, source_block, source_cross = self._map.resolve(batch.sources, batch.sizes)
        target_in, target_block, target_cross = self._map.resolve(batch.targets, batch.sizes)
        # A device side that is not KV memory on either end belongs to nobody we know: the batch is a host copy.
        keep = np.ones(len(batch.sizes), np.bool_)
        for write, mine, block, cross in (
            (False, source_in & ~target_in, source_block, source_cross),
            (True, target_in, target_block, target_cross),
        ):
            if not mine.any():
                continue
            nowhere = mine & ((block < 0) | cross)
            first = ""
            if nowhere.any():
                at = int(np.flatnonzero(nowhere)[0])
                address = int((batch.targets if write else batch.sources)[at])
                storage = self._map.storage_of(address)
                base = self._map.bases[storage] if storage is not None else 0
                first = f"storage {storage} byte {address - base}, {int(batch.sizes[at])} bytes"
            self._report(
                Access(
                    write, "copy", int(mine.sum()), int(batch.sizes[mine].sum()),
                    set(block[mine & (block >= 0)].tolist()), int((mine & (block < 0)).sum()),
                    int((mine & cross).sum()), first,
                    self._starts(batch.targets if write else batch.sources, block, mine),
                )
            )  # fmt: skip
            past_end = mine & self._leaves_storage(batch.targets if write else batch.sources, batch.sizes)
            keep &= ~past_end
        lost = ~source_in & ~target_in
        for write in (False, True):
            # Neither end is KV memory, though one was meant to be: counted and not executed.
            mine = lost & (batch.reads != write)
            if mine.any():
                address = int((batch.targets if write else batch.sources)[mine][0])
                self._report(
                    Access(
                        write, "copy", int(mine.sum()), int(batch.sizes[mine].sum()), set(), int(mine.sum()), 0,
                        f"address {address:#x} is in no KV storage",
                    )
                )  # fmt: skip
        keep &= ~lost
        return CopyBatch(batch.sources[keep], batch.targets[keep], batch.sizes[keep], batch.reads[keep])

    def _starts(self, addresses: Any, block: Any, mine: Any) -> dict[int, tuple[int, int]]:
        """First address used of each block, as (storage, byte in it)."""
        starts: dict[int, tuple[int, int]] = {}
        for at in np.flatnonzero(mine & (block >= 0)).tolist():
            storage = self._map.storage_of(int(addresses[at]))
            if storage is not None:
                starts.setdefault(int(block[at]), (storage, int(addresses[at]) - self._map.bases[storage]))
        return starts

    def _leaves_storage(self, addresses: Any, sizes: Any) -> Any:
        ends = addresses.astype(np.int64) + sizes
        leaves = np.zeros(ends.shape, np.bool_)
        for base, size in zip(self._map.bases, self._map.sizes, strict=True):
            here = (addresses.astype(np.int64) >= base) & (addresses.astype(np.int64) < base + size)
            leaves |= here & (ends > base + size)
        return leaves


class TorchRecorder(TorchDispatchMode):
    """Sees every torch operator a connector runs and reports those that index or write KV memory."""

    _INDEXED_READS = ("aten.index.Tensor", "aten.index_select.default", "aten.gather.default")
    _INDEXED_WRITES = ("aten.index_put_.default", "aten.index_copy_.default", "aten._index_put_impl_.default")
    _PLAIN_WRITES = ("aten.copy_.default", "aten.fill_.Scalar", "aten.zero_.default", "aten.set_.source_Tensor")

    def __init__(self, addresses: AddressMap, report: Callable[[Access], None]) -> None:
        super().__init__()
        self._map = addresses
        self._report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.device.type != "meta" and self._in_kv(first):
            if name in self._INDEXED_READS:
                self._indexed(first, args[1], write=False)
            elif name in self._INDEXED_WRITES:
                self._indexed(first, args[1], write=True)
            elif name in self._PLAIN_WRITES:
                self._whole(first, write=True)
            elif name == "aten.clone.default":
                self._whole(first, write=False)
        elif name == "aten.copy_.default" and isinstance(args[1], torch.Tensor) and self._in_kv(args[1]):
            self._whole(args[1], write=False)
        return func(*args, **(kwargs or {}))

    def _in_kv(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() > 0 and self._map.storage_of(tensor.data_ptr()) is not None

    def _indexed(self, tensor: torch.Tensor, indices: Any, write: bool) -> None:
        index = next((i for i in _as_list(indices) if isinstance(i, torch.Tensor)), None)
        axis = next((n for n, i in enumerate(_as_list(indices)) if isinstance(i, torch.Tensor)), 0)
        if index is None:
            return
        values = index.reshape(-1).to(torch.int64).cpu().numpy()
        values = np.where(values < 0, values + tensor.shape[axis], values)
        item = tensor.element_size()
        addresses = tensor.data_ptr() + values * (tensor.stride(axis) * item)
        inside, block, crossing = self._map.resolve(addresses, np.full(values.shape, item))
        nbytes = values.size * item * max(1, tensor[0].numel() if tensor.dim() else 1)
        self._report(
            Access(write, "torch", values.size, nbytes, set(block[inside & (block >= 0)].tolist()),
                   int((~inside | (block < 0)).sum()), int(crossing.sum()))
        )  # fmt: skip

    def _whole(self, tensor: torch.Tensor, write: bool) -> None:
        """A contiguous or strided region: its blocks are those of the addresses along its first axis."""
        item = tensor.element_size()
        steps = np.arange(tensor.shape[0] if tensor.dim() else 1)
        stride = tensor.stride(0) * item if tensor.dim() else 0
        addresses = tensor.data_ptr() + steps * stride
        inside, block, _ = self._map.resolve(addresses, np.full(steps.shape, item))
        blocks = set(block[inside & (block >= 0)].tolist())
        if not write and len(blocks) >= self._map.layout.num_blocks - 1:
            return  # a copy of the whole cache to read from: says nothing about the blocks that are used
        self._report(Access(write, "torch", steps.size, tensor.numel() * item, blocks))


def _as_list(indices: Any) -> list[Any]:
    return list(indices) if isinstance(indices, Iterable) and not isinstance(indices, torch.Tensor) else [indices]
