"""The layout: storages, groups and resources as plain affine byte addresses.

A *resource* is one layer's share of a block: ``rows`` rows (one per token, per compressed group of tokens, or one
for a whole state), each row a set of cells of contiguous bytes. Everything is counted in bytes [B]::

    address(block, row, cell) = offset + block * block_stride
                              + sum(row index . row strides) + sum(cell index . cell strides)

Source of the rule: vLLM's ``KVCacheTensor`` (offset, layer_stride, block_stride) and the logical page [H, N, C].
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Axis:
    """One dimension of an affine address: ``count`` steps of ``stride`` bytes."""

    count: int
    stride: int


@dataclass(frozen=True)
class Storage:
    """One allocation of the runner. ``nbytes`` bytes, numbered in the order of first appearance."""

    id: int
    nbytes: int


@dataclass(frozen=True)
class Field:
    """A named part of every row (K, V, latent, rope, conv, ssm, record ...).

    ``start`` and ``end`` are bytes inside the innermost cell when the row has an outer cell axis (heads), else
    inside the row.
    """

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Group:
    """One KV-cache group: layers that share a block table.

    ``kind`` is vLLM's spec kind; ``rule`` says which rows an external hit must bring back (all | window | state |
    recomputed); ``window`` is in tokens (0: none); ``block_size`` in tokens.
    """

    id: int
    kind: str
    block_size: int
    layers: tuple[str, ...]
    rule: str
    window: int = 0
    spec: str = ""


@dataclass(frozen=True)
class Resource:
    """One layer's share of a block, see the module docstring. ``page_bytes`` includes padding."""

    id: int
    group: int
    layer: str
    dtype: str
    storage: int
    offset: int
    block_stride: int
    page_bytes: int
    row_axes: tuple[Axis, ...]
    cell_axes: tuple[Axis, ...]
    tokens_per_row: int  # 0: one row is a whole state
    fields: tuple[Field, ...]

    @property
    def rows(self) -> int:
        """Rows per manager block."""
        return math.prod(axis.count for axis in self.row_axes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, without padding."""
        return math.prod(axis.count for axis in self.cell_axes)

    @property
    def used_bytes(self) -> int:
        """Bytes of one block's page that carry content."""
        return self.rows * self.row_bytes

    def view(self, memory: ByteArray, num_blocks: int, offset: int | None = None) -> ByteArray:
        """Writable view ``[num_blocks, *row axes, *cell axes]`` uint8 of the storage's bytes ``memory``.

        ``offset`` replaces the resource's own offset (used to address a copy of one page).
        """
        axes = (*self.row_axes, *self.cell_axes)
        start = self.offset if offset is None else offset
        end = start + (num_blocks - 1) * self.block_stride + sum((a.count - 1) * a.stride for a in axes) + 1
        if num_blocks < 1 or end > memory.nbytes:
            raise ValueError(f"resource {self.id} ends at byte {end}, limit {memory.nbytes} bytes of storage")
        return np.lib.stride_tricks.as_strided(
            memory[start:],
            shape=(num_blocks, *(a.count for a in axes)),
            strides=(self.block_stride, *(a.stride for a in axes)),
        )

    def page_byte(self, row: int, byte: int) -> int:
        """Byte offset inside the page of byte ``byte`` of row ``row``."""
        return _affine(row, self.row_axes) + _affine(byte, self.cell_axes)

    def locate(self, page_byte: int) -> tuple[int, int] | None:
        """Inverse of :meth:`page_byte`: (row, byte in row), or None for padding."""
        offsets = self.page_offsets()
        hit = np.flatnonzero(offsets == page_byte)
        return None if hit.size == 0 else (int(hit[0]) // self.row_bytes, int(hit[0]) % self.row_bytes)

    def page_offsets(self) -> npt.NDArray[np.int64]:
        """Byte offset inside the page of every used byte, int64 ``[rows * row_bytes]`` in row order."""
        offsets = np.zeros(1, np.int64)
        for axis in (*self.row_axes, *self.cell_axes):
            offsets = (offsets[:, None] + np.arange(axis.count, dtype=np.int64) * axis.stride).reshape(-1)
        return offsets

    def field_at(self, row_byte: int) -> str:
        """Name of the field that owns byte ``row_byte`` of a row."""
        inner = row_byte % self.cell_axes[-1].count
        for part in self.fields:
            if part.start <= inner < part.end:
                return part.name
        return "row"


def _affine(index: int, axes: tuple[Axis, ...]) -> int:
    offset = 0
    for axis in reversed(axes):
        index, step = divmod(index, axis.count)
        offset += step * axis.stride
    return offset


@dataclass(frozen=True)
class Layout:
    """Every KV byte of one worker. ``kv_layout`` is vLLM's name of the axis order (LBHNC ...)."""

    kv_layout: str
    num_blocks: int
    storages: tuple[Storage, ...]
    groups: tuple[Group, ...]
    resources: tuple[Resource, ...]

    def group_resources(self, group: int) -> tuple[Resource, ...]:
        return tuple(r for r in self.resources if r.group == group)

    @property
    def bytes_per_block(self) -> int:
        """Bytes [B] one block id owns over all pages; what pages of several groups share is counted once."""
        owned, storage, end = 0, -1, 0
        for r in sorted(self.resources, key=lambda r: (r.storage, r.offset)):
            begin = r.offset if r.storage != storage else max(r.offset, end)
            stop = r.offset + r.page_bytes
            owned += max(0, stop - begin)
            storage, end = r.storage, max(begin, stop)
        return owned

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Layout:
        def axes(items: list[dict[str, int]]) -> tuple[Axis, ...]:
            return tuple(Axis(**a) for a in items)

        return Layout(
            kv_layout=data["kv_layout"],
            num_blocks=data["num_blocks"],
            storages=tuple(Storage(**s) for s in data["storages"]),
            groups=tuple(Group(**{**g, "layers": tuple(g["layers"])}) for g in data["groups"]),
            resources=tuple(
                Resource(
                    **{
                        **r,
                        "row_axes": axes(r["row_axes"]),
                        "cell_axes": axes(r["cell_axes"]),
                        "fields": tuple(Field(**f) for f in r["fields"]),
                    }
                )
                for r in data["resources"]
            ),
        )
