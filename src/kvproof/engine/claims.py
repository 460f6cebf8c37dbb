"""What a connector does to KV memory, seen from outside: its copy lists and its torch operations.

Both are resolved to blocks here. Whether those blocks were allowed is for the legality oracle to say.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import thread
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

    def starts(
        self, addresses: np.ndarray[Any, Any], block: np.ndarray[Any, Any], mine: np.ndarray[Any, Any]
    ) -> dict[int, tuple[int, int]]:
        """First address used of each block, as (storage, byte in it); ``block`` as :meth:`resolve` answers."""
        starts: dict[int, tuple[int, int]] = {}
        chosen = np.flatnonzero(mine & (block >= 0))
        for at in chosen[np.unique(block[chosen], return_index=True)[1]].tolist():
            storage = self.storage_of(int(addresses[at]))
            if storage is not None:
                starts[int(block[at])] = (storage, int(addresses[at]) - self.bases[storage])
        return starts

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
                    self._map.starts(batch.targets if write else batch.sources, block, mine),
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

    def _leaves_storage(self, addresses: Any, sizes: Any) -> Any:
        ends = addresses.astype(np.int64) + sizes
        leaves = np.zeros(ends.shape, np.bool_)
        for base, size in zip(self._map.bases, self._map.sizes, strict=True):
            here = (addresses.astype(np.int64) >= base) & (addresses.astype(np.int64) < base + size)
            leaves |= here & (ends > base + size)
        return leaves


class TorchRecorder(TorchDispatchMode):
    """Sees every torch operator a connector runs and reports those that read or write KV memory.

    Which argument an operator writes, and which it only makes a view of, its schema says; so does it where the operator
    picks by index. Operators of others than torch take whole caches and touch a part that no schema tells: unreported.
    """

    _NOTHING_READ = ("_like", "new_", "_unsafe_view")
    """Parts of names of operators that look at a tensor's shape and type only."""

    def __init__(self, addresses: AddressMap, report: Callable[[Access], None]) -> None:
        super().__init__()
        self._map = addresses
        self._report = report
        # Pages begin and end at multiples of this: a run of as many bytes lies in two of them at most.
        self._grain = math.gcd(*(n for f in addresses.families for n in (f.offset, f.nbytes, f.block_stride))) or 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and torch.Tag.inplace_view not in func.tags:
            self._look(func, args, kwargs)
        return func(*args, **kwargs)

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        given = {a.name: args[n] if n < len(args) else kwargs.get(a.name) for n, a in enumerate(func._schema.arguments)}
        for argument in func._schema.arguments:
            write = argument.alias_info is not None and argument.alias_info.is_write
            if argument.alias_info is not None and not write:
                continue  # a view of it is made
            if not write and any(part in func._opname for part in self._NOTHING_READ):
                continue
            for tensor in _tensors(given[argument.name]):
                if self._in_kv(tensor):
                    # Only the first argument is picked from: the others are sources and masks of the same size.
                    picked, shape = self._picked(tensor, given) if argument.name == "self" else ({}, tensor.shape)
                    self._access(tensor, picked, shape, write)

    @staticmethod
    def _picked(tensor: torch.Tensor, given: dict[str, Any]) -> tuple[dict[int, torch.Tensor], Sequence[int]]:
        """Axis -> index tensor, in torch's two ways of saying so; and how far the other axes are used."""
        dim, along = given.get("dim"), given.get("index")
        if isinstance(dim, int) and isinstance(along, torch.Tensor) and tensor.dim():
            # gather and scatter pick element by element: any of these indices at any place the index reaches.
            shape = along.shape if along.dim() == tensor.dim() else tensor.shape
            return {dim % tensor.dim(): along.unique()}, shape
        picked: dict[int, torch.Tensor] = {}
        axis = 0
        for index in given.get("indices") or ():
            if index is None:
                axis += 1
            elif index.dtype in (torch.bool, torch.uint8):
                for column in index.nonzero(as_tuple=True):
                    picked[axis] = column
                    axis += 1
            else:
                picked[axis] = index
                axis += 1
        return picked, tensor.shape

    def _in_kv(self, tensor: torch.Tensor) -> bool:
        meta = tensor.device.type == "meta" or tensor.numel() == 0
        return not meta and self._map.storage_of(tensor.data_ptr()) is not None

    def _access(
        self, tensor: torch.Tensor, picked: dict[int, torch.Tensor], shape: Sequence[int], write: bool
    ) -> None:
        """Report the first ``shape`` of ``tensor``, or the part of it ``picked`` by indices along some of its axes."""
        item = tensor.element_size()
        extent, outer = item, []  # of one run of bytes; byte offsets of the runs, axis by axis
        rest = [axis for axis in range(tensor.dim()) if axis not in picked and shape[axis] > 1]
        for axis in sorted(rest, key=tensor.stride):
            step, count = tensor.stride(axis) * item, shape[axis]
            if step == extent:
                extent *= count
            else:
                outer.append(np.arange(count, dtype=np.int64) * step)
        if extent > self._grain:
            outer.append(np.append(np.arange(0, extent - self._grain, self._grain), extent - self._grain))
            extent = self._grain
        chosen = self._chosen(tensor, picked)
        outer += [] if chosen is None else [chosen]
        offsets = np.zeros(1, np.int64)
        for more in outer:
            offsets = (offsets[:, None] + more[None, :]).reshape(-1)
        starts = (tensor.data_ptr() + offsets).astype(np.uint64)
        ends = starts + np.uint64(extent - 1)
        one = np.ones(starts.shape, np.int64)
        _, block, _ = self._map.resolve(starts, one)
        _, last, _ = self._map.resolve(ends, one)
        blocks = set(block[block >= 0].tolist()) | set(last[last >= 0].tolist())
        if not write and not picked and len(blocks) >= self._map.layout.num_blocks - 1:
            return  # a copy of the whole cache to read from: says nothing about the blocks that are used
        nbytes = item * (1 if chosen is None else chosen.size) * math.prod(shape[axis] for axis in rest)
        both, found = np.concatenate([starts, ends]), np.concatenate([block, last])
        self._report(
            Access(
                write, "torch", offsets.size, nbytes, blocks,
                # A region may run over what lies between pages (footprint sees what is written); an index may not.
                int(((block < 0) | (last < 0)).sum()) if picked else 0,
                starts=self._map.starts(both, found, found >= 0),
            )
        )  # fmt: skip

    @staticmethod
    def _chosen(tensor: torch.Tensor, picked: dict[int, torch.Tensor]) -> np.ndarray[Any, Any] | None:
        """Byte offsets of what the indices pick together; None where nothing is picked."""
        total: np.ndarray[Any, Any] | None = None
        for axis, index in picked.items():
            values = index.detach().to(torch.int64).cpu().numpy()
            values = np.where(values < 0, values + tensor.shape[axis], values)
            step = tensor.stride(axis) * tensor.element_size()
            total = values * step if total is None else total + values * step
        return None if total is None else np.asarray(total).reshape(-1)


def watch_threads(recorder: Callable[[], TorchRecorder]) -> None:
    """Let ``recorder()`` see what others do with torch: threads that start from now on, and jobs of thread pools.

    A dispatch mode holds for one thread only. A thread that runs already and takes its work from a queue of its own is
    not seen.
    """
    watched = threading.local()  # a pool's thread runs its jobs: only the outer of the two is watched
    for kind in (threading.Thread, thread._WorkItem):

        def observed(self: Any, _production: Any = kind.run) -> Any:
            if getattr(watched, "yes", False):
                return _production(self)
            watched.yes = True
            try:
                with recorder():
                    return _production(self)
            finally:
                watched.yes = False

        kind.run = observed  # type: ignore[method-assign]


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of an operator's argument: one, or a list of them."""
    several = value if isinstance(value, list | tuple) else [value]
    return [tensor for tensor in several if isinstance(tensor, torch.Tensor)]
