"""Reads the layout off the runner's own tensors.

Where a page starts comes from vLLM's ``KVCacheTensor`` (offset, layer_stride, block_stride); what a page looks like
inside comes from the runner's view of that layer. Both must agree on every address they share, else
:class:`LayoutDisagreementError`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)

from kvproof.bytecode.ledger import ByteArray
from kvproof.engine import runner_placement
from kvproof.layout import Axis, Field, Group, Layout, Resource, Storage
from kvproof.platforms import device_memory
from kvproof.platforms.platform import Platform


class LayoutDisagreementError(ValueError):
    """vLLM's placement and the runner's view name different addresses for the same byte."""


@dataclass(frozen=True)
class Memory:
    """The layout, the bytes of each storage, and the runner's view(s) of each layer."""

    layout: Layout
    bytes: device_memory.Memory
    views: dict[int, torch.Tensor]
    """Resource id -> the runner's own view of it."""

    @property
    def storages(self) -> list[ByteArray]:
        """The bytes of each storage, uint8, writable; on a real device to be pulled and pushed."""
        return self.bytes.arrays

    @property
    def addresses(self) -> list[int]:
        """Where each storage begins, in the platform's own addresses."""
        return self.bytes.addresses


def read_layout(
    config: KVCacheConfig,
    forward_context: dict[str, Any],
    kv_lora_rank: int | None,
    platform: Platform,
) -> Memory:
    """Layout of one worker. ``forward_context`` maps layer names to modules with their bound ``kv_cache``.

    Where the platform's runner allocates on its own, see :mod:`kvproof.engine.runner_placement`.
    """
    groups, layer_specs = _groups(config)
    bound = [layer for layer in layer_specs if layer in forward_context]
    views = {layer: [platform.host(view) for view in _views(forward_context[layer])] for layer in bound}
    by_resource: dict[int, torch.Tensor] = {}
    storages: dict[int, int] = {}
    allocations: list[torch.UntypedStorage] = []
    resources: list[Resource] = []
    for storage in (v.untyped_storage() for layer in _in_plan(config, views) for v in views[layer]):
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = len(storages)
            allocations.append(storage)
    if platform.runner_places:
        placed = runner_placement.place(views, storages)
        runner_placement.check(config, {layer: spec for layer, (_, spec) in layer_specs.items()}, placed)
    for tensor in config.kv_cache_tensors:
        for index, layer in enumerate(tensor.layers):
            if layer not in views:
                continue
            group, spec = layer_specs[layer]
            if platform.runner_places:
                mine, seen = runner_placement.resources(
                    len(resources), group, layer, spec, placed[layer], config.num_blocks
                )
                by_resource |= dict(enumerate(seen, len(resources)))
                resources += mine
                continue
            storage = views[layer][0].untyped_storage()
            page = tensor.offset + index * tensor.layer_stride
            by_resource |= dict(enumerate(views[layer], len(resources)))
            resources += _resources(
                len(resources), group, layer, spec, views[layer], storages[storage.data_ptr()], storage.data_ptr(),
                page, tensor.block_stride, config.num_blocks, kv_lora_rank,
            )  # fmt: skip
    if platform.runner_places:
        resources = runner_placement.bounded(resources, placed)
    missing = sorted(set(layer_specs) - {r.layer for r in resources})
    if missing:
        raise LayoutDisagreementError(f"layer {missing[0]} has a cache spec but no tensor, {len(missing)} such layers")
    layout = Layout(
        str(config.kv_cache_layout),
        config.num_blocks,
        tuple(Storage(i, storage.nbytes()) for i, storage in enumerate(allocations)),
        groups,
        tuple(resources),
    )
    return Memory(layout, platform.memory(allocations), by_resource)


def _in_plan(config: KVCacheConfig, views: dict[str, list[torch.Tensor]]) -> list[str]:
    """The layers with views, in the order of vLLM's plan."""
    return [layer for tensor in config.kv_cache_tensors for layer in tensor.layers if layer in views]


def _groups(config: KVCacheConfig) -> tuple[tuple[Group, ...], dict[str, tuple[int, KVCacheSpec]]]:
    groups = []
    layer_specs: dict[str, tuple[int, KVCacheSpec]] = {}
    for index, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        inner = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
        first = next(iter(inner.values())) if inner else spec
        for layer in group.layer_names:
            layer_specs[layer] = (index, inner.get(layer, spec))
        rule, window = _rule(first, group.enable_kv_transfer)
        groups.append(
            Group(
                index,
                _kind(spec, first),
                spec.block_size,
                tuple(group.layer_names),
                rule,
                window,
                f"{type(first).__name__}",
            )
        )
    return tuple(groups), layer_specs


def _kind(group: KVCacheSpec, first: KVCacheSpec) -> str:
    """vLLM's name for the kind of a group; it has none for rings."""
    return "circular_buffer" if isinstance(first, CircularBufferSpec) else get_kv_cache_spec_kind(group).value


def _rule(spec: KVCacheSpec, transferable: bool) -> tuple[str, int]:
    """What an external hit must bring back, from vLLM's own spec; window in tokens."""
    if not transferable or not spec.prefix_cacheable:
        return "recomputed", 0
    if isinstance(spec, MambaSpec):
        return "state", 0
    if isinstance(spec, SlidingWindowSpec):
        return "window", spec.sliding_window
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return "window", spec.attention_chunk_size
    if isinstance(spec, CrossAttentionSpec | EncoderOnlyAttentionSpec):
        return "recomputed", 0
    return "all", 0


def _views(module: Any) -> list[torch.Tensor]:
    cache = module.kv_cache
    views = list(cache) if isinstance(cache, list | tuple) else [cache]
    # Some modules keep a list per virtual engine, some a tuple of states; both flatten to tensors.
    return [t for v in views for t in (v if isinstance(v, list | tuple) else [v]) if t.numel()]


def _resources(
    first_id: int,
    group: int,
    layer: str,
    spec: KVCacheSpec,
    views: list[torch.Tensor],
    storage: int,
    base: int,
    page: int,
    block_stride: int,
    num_blocks: int,
    kv_lora_rank: int | None,
) -> list[Resource]:
    resources = []
    for number, view in enumerate(views):
        item = view.element_size()
        if view.untyped_storage().data_ptr() != base:
            raise LayoutDisagreementError(f"layer {layer}: its views lie in different storages")
        offset = view.data_ptr() - base
        is_state = isinstance(spec, MambaSpec)
        ratio = view.shape[0] // num_blocks
        if ratio * num_blocks != view.shape[0] or view.stride(0) * item * ratio != block_stride:
            raise LayoutDisagreementError(
                f"layer {layer}: view has {view.shape[0]} blocks of stride {view.stride(0) * item} bytes, "
                f"vLLM's placement says {num_blocks} of {block_stride} bytes"
            )
        if not page <= offset < page + spec.page_size_bytes or (number == 0 and offset != page):
            raise LayoutDisagreementError(
                f"layer {layer}: view starts at byte {offset} of its storage, vLLM's placement says byte {page}"
            )
        inner = [Axis(n, s * item) for n, s in zip(view.shape[1:], view.stride()[1:], strict=True)]
        if view.dim() == 3:
            inner.insert(0, Axis(1, 0))  # MLA views come without their one head
        if is_state or len(inner) != 3:
            rows: tuple[Axis, ...] = (Axis(1, 0),)
            cells = _joined([*inner, Axis(item, 1)])
            tokens_per_row = 0
            fields: tuple[Field, ...] = (Field(_state_name(spec, number, len(views)), 0, cells[-1].count),)
        else:
            heads, states, content = inner
            split = (Axis(ratio, block_stride // ratio),) if ratio > 1 else ()
            rows = (*split, states)
            cells = (heads, Axis(content.count * item, 1)) if heads.count > 1 else (Axis(content.count * item, 1),)
            per_state = getattr(spec, "tokens_per_state", 1)
            tokens_per_row = int(per_state) if per_state >= 1 else 1
            fields = _fields(spec, cells[-1].count, item, kv_lora_rank)
        resources.append(
            Resource(
                first_id + number, group, layer, str(view.dtype).removeprefix("torch."), storage, offset, block_stride,
                spec.page_size_bytes - (offset - page), rows, cells, tokens_per_row, fields,
            )
        )  # fmt: skip
    if len(resources) > 1:
        # The states of one layer share its page: each resource keeps its own bytes, the last one the padding.
        bounds = [r.offset for r in resources[1:]] + [page + spec.page_size_bytes]
        resources = [
            Resource(**{**r.__dict__, "page_bytes": end - r.offset}) for r, end in zip(resources, bounds, strict=True)
        ]
    return resources


def _joined(axes: list[Axis]) -> tuple[Axis, ...]:
    """Merge adjacent axes that are contiguous, innermost last."""
    joined = [axes[-1]]
    for axis in reversed(axes[:-1]):
        if axis.stride == joined[0].count * joined[0].stride:
            joined[0] = Axis(axis.count * joined[0].count, joined[0].stride)
        else:
            joined.insert(0, axis)
    return tuple(joined)


def _fields(spec: KVCacheSpec, content_bytes: int, item: int, kv_lora_rank: int | None) -> tuple[Field, ...]:
    if isinstance(spec, MLAAttentionSpec) and kv_lora_rank and spec.head_size * item == content_bytes:
        split = kv_lora_rank * item
        if 0 < split < content_bytes:
            return Field("latent", 0, split), Field("rope", split, content_bytes)
    if isinstance(spec, AttentionSpec) and not isinstance(spec, MLAAttentionSpec):
        split = spec.head_size * item
        if split + spec.head_size_v * item == content_bytes and spec.head_size_v:
            return Field("K", 0, split), Field("V", split, content_bytes)
    return (Field("record", 0, content_bytes),)


def _state_name(spec: KVCacheSpec, number: int, count: int) -> str:
    if count == 1:
        return "state"
    sizes = [math.prod(shape) for shape in getattr(spec, "shapes", ())]
    if len(sizes) == 2:
        return ("conv", "ssm")[number]
    return f"state{number}"
