"""Frames: what a block id owns, and what must be refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import layouts, naive_page

from kvproof.layout import Axis, Layout, Resource, Storage
from kvproof.layout.frames import frame_families


def page(number: int, offset: int, page_bytes: int, block_stride: int, storage: int = 0, group: int = 0) -> Resource:
    return Resource(
        number, group, f"layer.{number}", "uint8", storage, offset, block_stride, page_bytes, (Axis(1, 0),),
        (Axis(page_bytes, 1),), 1, (),
    )  # fmt: skip


def layout_of(*resources: Resource, num_blocks: int = 3) -> Layout:
    return Layout("LBHNC", num_blocks, (Storage(0, 10_000), Storage(1, 10_000)), (), resources)


def naive_conflict(layout: Layout) -> bool:
    """Whether any byte belongs to two different block ids."""
    owner: dict[tuple[int, int], int] = {}
    for r in layout.resources:
        for block in range(layout.num_blocks):
            for byte in naive_page(r, block):
                if owner.setdefault((r.storage, byte), block) != block:
                    return True
    return False


@settings(max_examples=40)
@given(layouts())
def test_families_cover_every_page_and_nothing_else(layout):
    families = frame_families(layout)
    assert sorted(r.id for f in families for r in f.resources) == sorted(r.id for r in layout.resources)
    for block in range(layout.num_blocks):
        pages = {(r.storage, byte) for r in layout.resources for byte in naive_page(r, block)}
        frames = [
            (f.storage, f.offset + block * f.block_stride + i) for f in families for i in range(f.nbytes)
        ]
        assert len(frames) == len(set(frames))
        assert set(frames) == pages
    for f in families:
        assert f.resources[0].offset == f.offset


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30), st.integers(0, 1)), min_size=1, max_size=4),
    st.sampled_from((10, 20, 30, 45)),
    st.integers(1, 4),
)
def test_with_one_block_stride_exactly_the_layouts_whose_block_ids_share_bytes_are_refused(places, stride, num_blocks):
    layout = layout_of(
        *(page(i, offset, size, stride, storage) for i, (offset, size, storage) in enumerate(places)),
        num_blocks=num_blocks,
    )
    if naive_conflict(layout):
        with pytest.raises(ValueError, match="two block ids share bytes"):
            frame_families(layout)
    else:
        assert sum(len(f.resources) for f in frame_families(layout)) == len(places)


def test_interleaved_layers_are_families_of_their_own():
    layout = layout_of(*(page(i, i * 10, 10, 30) for i in range(3)))
    assert [(f.offset, f.nbytes, f.block_stride) for f in frame_families(layout)] == [
        (0, 10, 30), (10, 10, 30), (20, 10, 30)
    ]  # fmt: skip


def test_an_overlay_of_unequal_pages_is_one_frame_of_the_larger_one():
    small, large = page(0, 0, 8, 20, group=1), page(1, 0, 20, 20)
    tail = page(2, 8, 12, 20, group=1)
    (family,) = frame_families(layout_of(small, large, tail))
    assert (family.offset, family.nbytes) == (0, 20)
    assert family.of_group(1) == (small, tail)
    assert family.of_group(0) == (large,)


def test_pages_longer_than_their_block_stride_are_refused():
    with pytest.raises(ValueError, match="frame of 21 bytes, limit block stride 20 bytes"):
        frame_families(layout_of(page(0, 0, 21, 20)))


def test_one_block_may_be_longer_than_its_stride():
    assert len(frame_families(layout_of(page(0, 0, 21, 0), num_blocks=1))) == 1


def test_a_layer_shifted_by_one_block_is_refused():
    with pytest.raises(ValueError, match="two block ids share bytes in storage 0"):
        frame_families(layout_of(page(0, 0, 10, 10), page(1, 10, 10, 10)))


def test_a_shifted_layer_is_found_behind_another_one():
    """Layer 2 stands on block 1 of layer 0; layer 1 lies between them."""
    with pytest.raises(ValueError, match="two block ids share bytes in storage 0"):
        frame_families(layout_of(page(0, 0, 10, 100), page(1, 20, 10, 100), page(2, 105, 5, 100)))


def test_unequal_strides_that_overlap_are_refused():
    with pytest.raises(ValueError, match=r"resource 1 \(layer\.1\) overlaps .* stride 10 bytes, limit 20 bytes"):
        frame_families(layout_of(page(0, 0, 10, 20), page(1, 5, 10, 10)))


def test_unequal_strides_side_by_side_are_fine():
    assert len(frame_families(layout_of(page(0, 0, 10, 20), page(1, 60, 10, 10)))) == 2


def test_equal_offsets_in_two_storages_are_two_families():
    assert [f.storage for f in frame_families(layout_of(page(0, 0, 10, 10), page(1, 0, 10, 10, storage=1)))] == [0, 1]
