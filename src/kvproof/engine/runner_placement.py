"""Resources of a runner that allocates on its own: vllm-ascend plans with vLLM's KVCacheTensor and places differently.

Its views are block first, then token, head, content; a layer has one view per part (K and V, latent and rope, index
key and scale), in one allocation or in one each. Where a page starts and how far blocks are apart is read off the
views, and checked against what vLLM planned: the bytes of a block over a layer's allocations, the number of blocks,
the layers that may share an allocation, tokens and heads of every view.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheConfig, KVCacheSpec, MambaSpec, MLAAttentionSpec

from kvproof.layout import Axis, Field, Resource

ALIGNMENT = 2 << 20
"""Bytes. With a connector, vllm-ascend moves the start of an allocation up to a multiple of this."""


class PlacementError(ValueError):
    """A view contradicts what vLLM planned for its layer, or another view."""


@dataclass(frozen=True)
class Placed:
    """One view of a layer with the number and the start (address) of the allocation it lies in."""

    layer: str
    view: torch.Tensor
    storage: int
    origin: int

    @property
    def offset(self) -> int:
        """Bytes from the start of the allocation to block 0 of this view."""
        return self.view.data_ptr() - self.origin

    @property
    def start(self) -> int:
        """Bytes from the start of the storage to the start of the allocation: what alignment skipped."""
        return self.origin - self.view.untyped_storage().data_ptr()

    def block_stride(self, num_blocks: int) -> int:
        """Bytes from one manager block to the next."""
        blocks = self.view.shape[0]
        ratio = blocks // num_blocks
        if ratio * num_blocks != blocks:
            raise PlacementError(f"layer {self.layer}: a view has {blocks} blocks, vLLM planned {num_blocks}")
        return self.view.stride(0) * self.view.element_size() * ratio


def place(views: dict[str, list[torch.Tensor]], storages: dict[int, int]) -> dict[str, list[Placed]]:
    """Views by layer with their allocations; ``storages`` maps storage addresses to numbers."""
    starts: dict[int, int] = {}
    for view in (v for mine in views.values() for v in mine):
        base = view.untyped_storage().data_ptr()
        starts[base] = min(starts.get(base, view.data_ptr()), view.data_ptr())
    for base, start in starts.items():
        if start != base and (start % ALIGNMENT or start - base >= ALIGNMENT):
            raise PlacementError(f"an allocation begins {start - base} bytes into its storage, not at a 2 MiB boundary")
    return {
        layer: [Placed(layer, v, storages[b := v.untyped_storage().data_ptr()], starts[b]) for v in mine]
        for layer, mine in views.items()
    }


def check(config: KVCacheConfig, specs: dict[str, KVCacheSpec], placed: dict[str, list[Placed]]) -> None:
    """PlacementError where the runner's allocations contradict vLLM's plan."""
    planned = {layer: tensor for tensor in config.kv_cache_tensors for layer in tensor.layers}
    sharing: dict[int, set[str]] = {}
    for layer, mine in placed.items():
        strides = {p.storage: p.block_stride(config.num_blocks) for p in mine}
        allowed = {planned[layer].block_stride, specs[layer].page_size_bytes}
        if sum(strides.values()) not in allowed:
            raise PlacementError(
                f"layer {layer}: a block takes {sum(strides.values())} bytes over {len(strides)} allocations, "
                f"vLLM planned {' or '.join(map(str, sorted(allowed)))}"
            )
        for p in mine:
            stride = strides[p.storage]
            room = p.view.untyped_storage().nbytes() - p.start
            if p.block_stride(config.num_blocks) != stride or config.num_blocks * stride > room:
                raise PlacementError(
                    f"layer {layer}: {config.num_blocks} blocks of {p.block_stride(config.num_blocks)} bytes, "
                    f"the allocation has room for {room} bytes in blocks of {stride}"
                )
            sharing.setdefault(p.storage, set()).add(layer)
    for storage, layers in sharing.items():
        plans = {id(planned[layer]): planned[layer] for layer in layers}
        if len(layers) > 1 and len(plans) > 1 and len({t.size for t in plans.values()}) > 1:
            raise PlacementError(f"allocation {storage} is shared by layers of different plans: {sorted(layers)[:3]}")


def resources(
    first_id: int, group: int, layer: str, spec: KVCacheSpec, placed: list[Placed], num_blocks: int
) -> tuple[list[Resource], list[torch.Tensor]]:
    """The resources of one layer and the view of each, in the order of their bytes."""
    distinct = _without_overlays(placed)
    found = [
        _resource(first_id + n, group, layer, spec, p, num_blocks, _name(spec, n, len(distinct)))
        for n, p in enumerate(distinct)
    ]
    return found, [p.view for p in distinct]


def bounded(all_resources: Iterable[Resource], placed: dict[str, list[Placed]]) -> list[Resource]:
    """Pages of one group that lie in the same block: each ends where the next begins, the last one at the block's end.

    What lies between a resource's content and its page's end is padding, so a page must not cover another resource.
    """
    found = list(all_resources)
    starts = {p.storage: p.start for mine in placed.values() for p in mine}
    shares: dict[tuple[int, int, int], list[Resource]] = {}
    for r in found:
        shares.setdefault((r.group, r.storage, (r.offset - starts[r.storage]) // r.block_stride), []).append(r)
    ends: dict[int, int] = {}
    for (_, storage, region), mine in shares.items():
        offsets = sorted({r.offset for r in mine})
        for r in mine:
            later = [o for o in offsets if o > r.offset]
            ends[r.id] = later[0] if later else starts[storage] + (region + 1) * r.block_stride
    return [Resource(**{**r.__dict__, "page_bytes": ends[r.id] - r.offset}) for r in found]


def _without_overlays(placed: list[Placed]) -> list[Placed]:
    """The views that name bytes of their own: some backends add one that covers two others."""
    spans = [(p.storage, p.offset, p.offset + _extent(p.view)) for p in placed]
    return [
        p
        for n, p in enumerate(placed)
        if not any(s == spans[n][0] and b < spans[n][2] and spans[n][1] < e for s, b, e in spans[:n])
    ]


def _extent(view: torch.Tensor) -> int:
    """Bytes from the first to behind the last byte of one block of a view."""
    inner = zip(view.shape[1:], view.stride()[1:], strict=True)
    return (sum((n - 1) * s for n, s in inner) + 1) * view.element_size()


def _resource(
    number: int, group: int, layer: str, spec: KVCacheSpec, placed: Placed, num_blocks: int, name: str
) -> Resource:
    view, item = placed.view, placed.view.element_size()
    stride = placed.block_stride(num_blocks)
    ratio = view.shape[0] // num_blocks
    axes = [Axis(n, s * item) for n, s in zip(view.shape[1:], view.stride()[1:], strict=True)]
    per_row = _tokens_per_row(spec)
    if per_row == 0 or len(axes) != 3:
        rows, cells = (Axis(1, 0),), _contiguous([*axes, Axis(item, 1)])
        per_row = 0
    else:
        tokens, heads, content = axes
        planned_heads = getattr(spec, "num_kv_heads", 1)
        if tokens.count * ratio * per_row != spec.block_size or heads.count != planned_heads:
            raise PlacementError(
                f"layer {layer}: a block of {name} has {tokens.count * ratio} rows and {heads.count} heads, "
                f"vLLM planned {spec.block_size} tokens, {per_row} a row, and {planned_heads} heads"
            )
        split = (Axis(ratio, stride // ratio),) if ratio > 1 else ()
        rows = (*split, tokens)
        cell = Axis(content.count * item, 1)
        if content.stride != item:
            raise PlacementError(f"layer {layer}: content of {name} has stride {content.stride} bytes, expected {item}")
        cells = (heads, cell) if heads.count > 1 else (cell,)
    fields = (Field(name, 0, cells[-1].count),)
    return Resource(
        number, group, layer, str(view.dtype).removeprefix("torch."), placed.storage,
        placed.start + placed.offset, stride, stride - placed.offset % stride,
        rows, cells, per_row, fields,
    )  # fmt: skip


def _tokens_per_row(spec: KVCacheSpec) -> int:
    """Tokens one row stands for; 0 where a block holds one whole state."""
    if isinstance(spec, MambaSpec | CircularBufferSpec) or getattr(spec, "is_circular", False):
        return 0
    return int(getattr(spec, "tokens_per_state", 0) or getattr(spec, "compress_ratio", 0) or 1)


def _name(spec: Any, number: int, count: int) -> str:
    """What a view holds, by its place in the layer's tuple."""
    if isinstance(spec, MambaSpec):
        return ("conv", "ssm")[number] if count == 2 else f"state{number}" if count > 1 else "state"
    if getattr(spec, "scale_dim", 0) and count == 2:
        return ("index key", "index scale")[number]
    if isinstance(spec, MLAAttentionSpec):
        return ("latent", "rope")[number] if count == 2 else "latent"
    return ("K", "V")[number] if count == 2 else "record"


def _contiguous(axes: list[Axis]) -> tuple[Axis, ...]:
    """Adjacent axes that are contiguous as one, innermost last."""
    joined = [axes[-1]]
    for axis in reversed(axes[:-1]):
        if axis.count == 1:
            continue
        if axis.stride == joined[0].count * joined[0].stride:
            joined[0] = Axis(axis.count * joined[0].count, joined[0].stride)
        else:
            joined.insert(0, axis)
    return tuple(joined)
