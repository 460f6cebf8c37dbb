"""Addresses of the layout against counting them byte by byte."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layouts import layouts, naive_addresses, naive_cells, naive_page

from kvproof.layout import Axis, Field, Group, Layout, Resource, Storage


def head_major(heads: int = 2, tokens: int = 3, cell: int = 4, padding: int = 5) -> Resource:
    """[heads][tokens][cell] with K in the first half of every cell."""
    page = heads * tokens * cell + padding
    return Resource(
        0, 0, "model.layers.0.attn", "uint8", 0, 16, page, page, (Axis(tokens, cell),),
        (Axis(heads, tokens * cell), Axis(cell, 1)), 1, (Field("K", 0, cell // 2), Field("V", cell // 2, cell)),
    )  # fmt: skip


@settings(max_examples=40)
@given(layouts())
def test_every_byte_is_where_counting_finds_it(layout):
    for r in layout.resources:
        cells = list(naive_cells(r))
        assert (r.rows, r.row_bytes, r.used_bytes) == (cells[-1][0] + 1, cells[-1][1] + 1, len(cells))
        assert r.page_offsets().tolist() == [inside for _, _, inside in cells]
        assert [r.page_byte(row, byte) for row, byte, _ in cells] == [inside for _, _, inside in cells]


@settings(max_examples=15)
@given(layouts(cell_sizes=(1, 3, 8)))
def test_the_inverse_finds_each_byte_and_calls_the_rest_padding(layout):
    for r in layout.resources:
        owner = {inside: (row, byte) for row, byte, inside in naive_cells(r)}
        for inside in range(-1, r.page_bytes + 1):
            assert r.locate(inside) == owner.get(inside)


@settings(max_examples=30)
@given(layouts())
def test_a_view_touches_exactly_the_bytes_of_its_resource(layout):
    for r in layout.resources:
        memory = np.zeros(layout.storages[r.storage].nbytes, np.uint8)
        view = r.view(memory, layout.num_blocks)
        assert view.shape == (layout.num_blocks, *(a.count for a in r.row_axes), *(a.count for a in r.cell_axes))
        numbers = np.arange(view.size) % 250 + 1
        view[:] = numbers.reshape(view.shape)
        expected = bytearray(memory.nbytes)
        count = 0
        for block in range(layout.num_blocks):
            for _, _, inside in naive_cells(r):
                expected[r.offset + block * r.block_stride + inside] = count % 250 + 1
                count += 1
        assert memory.tobytes() == bytes(expected)


@settings(max_examples=30)
@given(layouts())
def test_no_byte_belongs_to_two_rows_of_one_group(layout):
    """Checks the random layouts themselves: what the other tests rest on."""
    group_of = {r.id: r.group for r in layout.resources}
    for owners in naive_addresses(layout).values():
        assert len({block for _, block, _, _ in owners}) == 1
        assert len({group_of[resource] for resource, _, _, _ in owners}) == len(owners)


@settings(max_examples=40)
@given(layouts())
def test_bytes_per_block_counts_shared_pages_once(layout):
    distinct = {(r.storage, byte) for r in layout.resources for byte in naive_page(r, 1)}
    assert layout.bytes_per_block == len(distinct)


def test_two_groups_of_unequal_pages_in_one_place_count_as_the_larger():
    wide, narrow = head_major(), head_major(heads=1)
    narrow = Resource(**{**narrow.__dict__, "id": 1, "group": 1, "block_stride": wide.block_stride})
    layout = Layout("LBHNC", 2, (Storage(0, 200),), (), (wide, narrow))
    assert layout.bytes_per_block == wide.page_bytes


@settings(max_examples=30)
@given(layouts())
def test_json_round_trip(layout):
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_a_view_can_be_laid_over_a_copy_of_one_page():
    r = head_major()
    page = np.arange(r.page_bytes, dtype=np.uint8)
    view = r.view(page, 1, offset=0)
    assert view[0, 2, 1].tolist() == [20, 21, 22, 23]  # token 2 of head 1: byte 1 * 12 + 2 * 4


@pytest.mark.parametrize(("nbytes", "num_blocks"), [(16 + 29 + 23, 2), (16 + 2 * 29, 3), (1000, 0)])
def test_a_view_outside_its_storage_is_refused_with_value_and_limit(nbytes, num_blocks):
    with pytest.raises(ValueError, match=rf"resource 0 ends at byte -?\d+, limit {nbytes} bytes of storage"):
        head_major().view(np.zeros(nbytes, np.uint8), num_blocks)


def test_a_view_may_end_with_its_last_used_byte():
    r = head_major()
    assert r.view(np.zeros(16 + 29 + 24, np.uint8), 2).shape == (2, 3, 2, 4)


@pytest.mark.parametrize(("row_byte", "name"), [(0, "K"), (1, "K"), (2, "V"), (3, "V"), (4, "K"), (7, "V")])
def test_fields_repeat_in_every_head(row_byte, name):
    assert head_major().field_at(row_byte) == name


def test_a_byte_of_no_field_is_called_row():
    r = Resource(**{**head_major().__dict__, "fields": (Field("latent", 0, 2),)})
    assert (r.field_at(1), r.field_at(2)) == ("latent", "row")


def test_resources_of_a_group():
    a, b = head_major(), Resource(**{**head_major().__dict__, "id": 1, "group": 1})
    layout = Layout("LBHNC", 2, (Storage(0, 200),), (Group(0, "x", 1, ("a",), "all"),), (a, b))
    assert layout.group_resources(1) == (b,)


@settings(max_examples=50)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), st.data())
def test_page_byte_and_locate_are_inverse(heads, tokens, cell, data):
    r = head_major(heads, tokens, cell)
    row, byte = data.draw(st.integers(0, tokens - 1)), data.draw(st.integers(0, heads * cell - 1))
    assert r.locate(r.page_byte(row, byte)) == (row, byte)
