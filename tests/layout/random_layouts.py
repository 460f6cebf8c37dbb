"""Random layouts, and a deliberately naive reading of them: pure loops over bytes, nothing of numpy.

Sizes are in bytes. A layout is drawn like vLLM builds one: *frames* (what a block id owns in one place) are put one
after the other, layer-outermost or block-outermost, and every group lays its own pages over them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from kvproof.layout import Axis, Field, Group, Layout, Resource, Storage

KINDS = ("LBHNC", "LBNHC", "BLHNC")
CELL_SIZES = (1, 3, 4, 7, 8, 16, 20, 24, 136, 144)


@dataclass(frozen=True)
class Shape:
    """What a page of one group looks like inside, before it is put anywhere."""

    row_axes: tuple[Axis, ...]
    cell_axes: tuple[Axis, ...]
    used: int  # bytes from the first to behind the last used one
    page: int  # used and padding
    tokens_per_row: int


@st.composite
def shapes(draw: st.DrawFn, head_major: bool, cell_sizes: tuple[int, ...] = CELL_SIZES) -> Shape:
    """One page: [kernel blocks] x rows x [heads] x cell, with holes between rows, kernel blocks and behind the page."""
    state = draw(st.booleans()) and draw(st.booleans())
    cell = draw(st.sampled_from(cell_sizes))
    heads = 1 if state else draw(st.integers(1, 3))
    rows = 1 if state else draw(st.integers(1, 4))
    kernel_blocks = 1 if state else draw(st.integers(1, 2))
    hole = draw(st.sampled_from((0, 0, 0, 1, 8)))
    if head_major:
        row_stride, head_stride = cell, rows * cell + hole
        inside = (heads - 1) * head_stride + rows * cell
    else:
        row_stride, head_stride = heads * cell + hole, cell
        inside = (rows - 1) * row_stride + heads * cell
    kernel_stride = inside + draw(st.sampled_from((0, 0, 5, 8)))
    row_axes: tuple[Axis, ...] = (Axis(rows, row_stride if rows > 1 else 0),)
    if kernel_blocks > 1:
        row_axes = (Axis(kernel_blocks, kernel_stride), *row_axes)
    cell_axes: tuple[Axis, ...] = (Axis(cell, 1),)
    if heads > 1:
        cell_axes = (Axis(heads, head_stride), *cell_axes)
    used = (kernel_blocks - 1) * kernel_stride + inside
    return Shape(
        row_axes, cell_axes, used, used + draw(st.sampled_from((0, 0, 1, 8, 13))),
        0 if state else draw(st.sampled_from((1, 1, 2))),
    )  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn, cell_sizes: tuple[int, ...] = CELL_SIZES) -> Layout:
    """A layout of 1 to 3 groups that overlay each other in 1 to 3 frames, 2 to 4 block ids."""
    kind = draw(st.sampled_from(KINDS))
    num_blocks = draw(st.integers(2, 4))
    num_groups, num_frames = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    # Layers per group: a group may leave some frames unused, but every frame is used by somebody.
    layers = [num_frames, *(draw(st.integers(1, num_frames)) for _ in range(num_groups - 1))]
    pages = [draw(shapes(kind.endswith("HNC"), cell_sizes)) for _ in range(num_groups)]
    split = [len(p.row_axes) == 1 and p.tokens_per_row == 0 and draw(st.booleans()) for p in pages]
    size = max(2 * p.page if s else p.page for p, s in zip(pages, split, strict=True))
    frame_stride = size + draw(st.sampled_from((0, 0, 3, 8)))
    start = draw(st.sampled_from((0, 0, 1, 8)))
    one_storage = kind.startswith("B") or draw(st.booleans())
    if kind.startswith("B"):
        block_stride = num_frames * frame_stride + draw(st.sampled_from((0, 8)))
        places = [(0, start + f * frame_stride) for f in range(num_frames)]
    else:
        block_stride = frame_stride
        places = [
            (0, start + f * num_blocks * frame_stride) if one_storage else (f, start) for f in range(num_frames)
        ]
    end = max(offset for _, offset in places) + num_blocks * block_stride
    resources: list[Resource] = []
    groups = []
    for g, (page, twice) in enumerate(zip(pages, split, strict=True)):
        names = tuple(f"model.layers.{g}.{f}.attn" for f in range(layers[g]))
        per_row = page.tokens_per_row
        rows = Resource(0, 0, "", "", 0, 0, 0, 0, page.row_axes, page.cell_axes, 1, ()).rows
        groups.append(
            Group(g, "any", rows * max(1, per_row), names, "state" if per_row == 0 else "all")
        )
        for f, name in enumerate(names):
            storage, offset = places[f]
            inner = page.cell_axes[-1].count
            fields = (Field("K", 0, inner // 2), Field("V", inner // 2, inner)) if inner > 1 else ()
            first = Resource(
                len(resources), g, name, "uint8", storage, offset, block_stride, page.page, page.row_axes,
                page.cell_axes, per_row, fields,
            )  # fmt: skip
            resources.append(first)
            if twice:  # a second state of the same layer, like conv and ssm
                resources.append(replace(first, id=first.id + 1, offset=offset + page.page))
    storages = tuple(Storage(i, end) for i in range(1 + max(s for s, _ in places)))
    return Layout(kind, num_blocks, storages, tuple(groups), tuple(resources))


# ---------------------------------------------------------------------- naive reading


def naive_cells(r: Resource) -> Iterator[tuple[int, int, int]]:
    """(row, byte in row, byte in page) of every used byte, by counting."""
    row_steps = [[i * a.stride for i in range(a.count)] for a in r.row_axes]
    cell_steps = [[i * a.stride for i in range(a.count)] for a in r.cell_axes]
    for row, where in enumerate(itertools.product(*row_steps)):
        for byte, inside in enumerate(itertools.product(*cell_steps)):
            yield row, byte, sum(where) + sum(inside)


def naive_addresses(layout: Layout) -> dict[tuple[int, int], list[tuple[int, int, int, int]]]:
    """(storage, byte) -> every (resource, block, row, byte in row) that lives there."""
    found: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for r in layout.resources:
        cells = list(naive_cells(r))
        for block in range(layout.num_blocks):
            for row, byte, inside in cells:
                found.setdefault((r.storage, r.offset + block * r.block_stride + inside), []).append(
                    (r.id, block, row, byte)
                )
    return found


def naive_page(r: Resource, block: int) -> range:
    """Bytes of the storage that one page covers, padding included."""
    begin = r.offset + block * r.block_stride
    return range(begin, begin + r.page_bytes)
