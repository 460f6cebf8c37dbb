"""Slots, reads and writes of paged caches against loops over single rows; strided caches, null block, no copies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvproof.deepseek_v41.ops import paging

BLOCKS, ROWS, WIDTH = 5, 4, 3


def strided(blocks: int = BLOCKS, rows: int = ROWS, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """A cache inside a larger buffer: foreign rows after each page, foreign channels after each row."""
    buffer = torch.arange(blocks * (rows + 2) * (width + 1), dtype=torch.float32).view(blocks, rows + 2, width + 1)
    return buffer, buffer[:, 1 : rows + 1, :width]


SLOTS = st.lists(st.integers(-1, BLOCKS * ROWS - 1), max_size=12)


@given(slots=SLOTS)
def test_reading_is_row_by_row_and_minus_one_is_zero(slots: list[int]) -> None:
    _, cache = strided()
    read = paging.read_rows(cache, torch.tensor(slots, dtype=torch.int64))
    assert read.shape == (len(slots), WIDTH)
    for slot, row in zip(slots, read, strict=True):
        expected = torch.zeros(WIDTH) if slot < 0 else cache[slot // ROWS, slot % ROWS]
        assert torch.equal(row, expected)


def test_reading_keeps_the_shape_of_the_slots_and_hides_a_nan_behind_minus_one() -> None:
    _, cache = strided()
    cache[0] = torch.nan
    slots = torch.tensor([[-1, 4], [5, -1], [6, 7]])
    read = paging.read_rows(cache, slots)
    assert read.shape == (3, 2, WIDTH)
    assert torch.equal(read[2], cache[1, 2:4])
    assert read[0, 0].tolist() == [0.0] * WIDTH
    assert not read.isnan().any()


@given(slots=SLOTS.map(lambda s: [x for i, x in enumerate(s) if x < 0 or x not in s[:i]]))
def test_writing_changes_the_named_rows_and_nothing_else_of_the_buffer(slots: list[int]) -> None:
    buffer, cache = strided()
    expected = buffer.clone()
    rows = -1.0 - torch.arange(len(slots) * WIDTH, dtype=torch.float32).view(len(slots), WIDTH)
    for slot, row in zip(slots, rows, strict=True):
        if slot >= 0:
            expected[slot // ROWS, 1 + slot % ROWS, :WIDTH] = row
    paging.write_rows(cache, torch.tensor(slots, dtype=torch.int64), rows)
    assert torch.equal(buffer, expected)


def test_writing_rounds_to_the_cache_once() -> None:
    cache = torch.zeros(1, 2, 1, dtype=torch.bfloat16)
    paging.write_rows(cache, torch.tensor([1]), torch.tensor([[1.00390625 + 2**-12]]))
    assert cache.flatten().tolist() == [0.0, 1.0078125]


def test_wrong_writes_are_refused_and_write_nothing() -> None:
    buffer, cache = strided()
    before = buffer.clone()
    with pytest.raises(ValueError, match=r"rows of shape \[2, 2\] do not fit slots \[2\] of 3 channels"):
        paging.write_rows(cache, torch.tensor([1, 2]), torch.zeros(2, 2))
    with pytest.raises(ValueError, match="do not fit"):
        paging.write_rows(cache, torch.tensor([1, 2]), torch.zeros(3, WIDTH))
    with pytest.raises(ValueError, match="slot 20 must be below 20"):
        paging.write_rows(cache, torch.tensor([1, BLOCKS * ROWS]), torch.zeros(2, WIDTH))
    with pytest.raises(IndexError):
        paging.read_rows(cache, torch.tensor([BLOCKS * ROWS]))
    assert torch.equal(buffer, before)


@given(table=st.lists(st.lists(st.integers(-1, BLOCKS - 1), min_size=3, max_size=3), min_size=1, max_size=3))
def test_whole_pages_come_in_table_order(table: list[list[int]]) -> None:
    _, cache = strided()
    read = paging.read_pages(cache, torch.tensor(table, dtype=torch.int32))
    assert read.shape == (len(table), 3 * ROWS, WIDTH)
    for pages, rows in zip(table, read, strict=True):
        for i, page in enumerate(pages):
            assert torch.equal(rows[i * ROWS : (i + 1) * ROWS], cache[max(page, 0)])


@given(
    table=st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=1, max_size=3),
    ratio=st.sampled_from([1, 2]),
    data=st.data(),
)
def test_slots_are_the_pages_of_the_request(table: list[list[int]], ratio: int, data: st.DataObject) -> None:
    block_size = 4
    tokens = data.draw(st.integers(0, 5))
    request = data.draw(st.lists(st.integers(-1, len(table) - 1), min_size=tokens, max_size=tokens))
    position = data.draw(
        st.lists(st.lists(st.integers(-2, 11), min_size=2, max_size=2), min_size=tokens, max_size=tokens)
    )
    slots = paging.slots_of(
        torch.tensor(table, dtype=torch.int32),
        torch.tensor(request, dtype=torch.int32),
        torch.tensor(position, dtype=torch.int64).view(tokens, 2),
        block_size,
        ratio,
    )
    expected = []
    for r, pair in zip(request, position, strict=True):
        for p in pair:
            page = table[r][p // block_size] if r >= 0 and p >= 0 else 0
            expected.append(page * (block_size // ratio) + (p % block_size) // ratio if page else -1)
    assert slots.dtype == torch.int64
    assert slots.flatten().tolist() == expected


def test_a_selected_group_is_found_through_its_first_position() -> None:
    # Block 16, ratio 2: 8 rows a page. Group 9 is row 1 of the second page.
    selected = torch.tensor([[0, 9, -1]])
    slots = paging.slots_of(torch.tensor([[3, 7]]), torch.tensor([0]), selected * 2, 16, ratio=2)
    assert slots.tolist() == [[24, 57, -1]]


def test_slots_refuse_what_has_no_answer() -> None:
    table, request = torch.tensor([[1, 2]]), torch.tensor([0])
    with pytest.raises(ValueError, match="block_size = 3 tokens must be a positive multiple of ratio = 2"):
        paging.slots_of(table, request, torch.tensor([0]), 3, ratio=2)
    with pytest.raises(ValueError, match="ratio = 0"):
        paging.slots_of(table, request, torch.tensor([0]), 4, ratio=0)
    with pytest.raises(IndexError):
        paging.slots_of(table, request, torch.tensor([8]), 4)


def test_reading_touches_only_the_rows_it_names() -> None:
    # A cache of 10^12 rows that all lie on one page: whoever copies or flattens it asks for petabytes.
    page = torch.arange(ROWS * 8, dtype=torch.float32).view(1, ROWS, 8)
    cache = page.expand(10**12 // ROWS, ROWS, 8)
    assert torch.equal(paging.read_rows(cache, torch.tensor([10**12 - 2])), page[0, 2:3])
    assert torch.equal(paging.read_pages(cache, torch.tensor([[10**11]])), page)
