"""The byte code against its own definition, computed byte by byte."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvproof.bytecode import ByteCode, Decoded, Fill
from kvproof.bytecode.code import (
    BASE,
    HEADER,
    MAX_CONTENTS,
    MAX_RESOURCES,
    MAX_ROW_BYTES,
    POISON_BYTES,
    RESOURCE_STEP,
    RING_WORDS,
    UNIT,
    optional,
    optional_content,
)  # fmt: skip

CODE = ByteCode(7)
RING = CODE._period.tobytes()
RESOURCES = {0: 512, 1: 512, 5: 136, 250: 300, 251: 1000, 252: 144}
CONTENTS = 400

row_sizes = st.one_of(st.integers(1, 300), st.sampled_from((512, 584, 1152, 4096)))
resources = st.one_of(st.integers(0, 600), st.integers(0, MAX_RESOURCES - 8))
contents = st.one_of(st.integers(0, 2000), st.integers(0, 200_000))


def naive_row(resource: int, content: int, row_bytes: int) -> bytes:
    """One row of the code, by its docstring."""
    words = (row_bytes + 7) // 8
    start = (content * words + resource * RESOURCE_STEP) % RING_WORDS * 8
    row = [RING[(start + i) % len(RING)] for i in range(words * 8)]
    if row_bytes >= HEADER:
        c = [content % BASE, content // BASE % BASE, content // BASE // BASE]
        for unit in range((words * 8 + UNIT - 1) // UNIT):
            row[unit * UNIT : unit * UNIT + 8] = [
                (3 * c[0] + 5 * c[1] + 7 * c[2]) % 125 + (11 * (resource % BASE) + 13 * (resource // BASE)) % 125 + 1,
                c[0], resource % BASE, c[1], resource // BASE, c[2], unit % BASE, unit // BASE,
            ]  # fmt: skip
    return bytes(row[:row_bytes])


def rows(resource: int, ids: list[int], row_bytes: int, code: ByteCode = CODE) -> list[bytes]:
    return [row.tobytes() for row in code.rows(resource, np.array(ids, np.int32), row_bytes)]


@settings(max_examples=60)
@given(resources, st.lists(contents, max_size=4), row_sizes)
def test_rows_are_what_the_definition_says(resource, ids, row_bytes):
    assert rows(resource, ids, row_bytes) == [naive_row(resource, c, row_bytes) for c in ids]


@settings(max_examples=20)
@given(resources, contents, st.integers(1, 40), row_sizes)
def test_consecutive_contents_are_the_single_rows_one_after_the_other(resource, first, count, row_bytes):
    ids = list(range(first, first + count))
    assert rows(resource, ids, row_bytes) == [rows(resource, [c], row_bytes)[0] for c in ids]


@settings(max_examples=20)
@given(resources, st.integers(0, MAX_CONTENTS - 64), row_sizes, st.integers(0, 3))
def test_no_byte_is_above_250(resource, first, row_bytes, seed):
    code = ByteCode(seed)
    assert code.rows(resource, np.arange(first, first + 4, dtype=np.int32), row_bytes).max() <= 250
    assert min(fill.byte for fill in Fill) > 250


def test_no_unit_of_the_longest_row_is_above_250():
    assert CODE.rows(0, np.array([MAX_CONTENTS - 1], np.int32), MAX_ROW_BYTES).max() <= 250


@settings(max_examples=60)
@given(st.tuples(resources, contents), st.tuples(resources, contents), st.integers(8, 600))
def test_rows_of_different_owners_differ(one, other, row_bytes):
    a, b = rows(one[0], [one[1]], row_bytes), rows(other[0], [other[1]], row_bytes)
    assert (a == b) == (one == other)


@settings(max_examples=30)
@given(resources, st.integers(1, 64), contents, contents, st.integers(1, 7))
def test_sixteen_rows_too_short_for_a_header_still_differ(a, apart, first, other, row_bytes):
    def page(resource: int, begin: int) -> bytes:
        return CODE.rows(resource, np.arange(begin, begin + 16, dtype=np.int32), row_bytes).tobytes()

    assert page(a, first) != page((a + apart) % MAX_RESOURCES, first)
    if (first - other) % RING_WORDS:
        assert page(a, first) != page(a, other)


@settings(max_examples=30)
@given(resources, contents, st.integers(8, 300))
def test_a_row_differs_in_its_first_byte_from_zero_the_next_layer_and_the_next_token(resource, content, row_bytes):
    first = rows(resource, [content], row_bytes)[0][0]
    assert first
    assert first != rows(resource + 1, [content], row_bytes)[0][0]
    assert first != rows(resource, [content + 1], row_bytes)[0][0]


@pytest.mark.parametrize("row_bytes", [1, 2, 4, 8, 512, 584])
def test_no_row_is_all_zero(row_bytes):
    """Zero is what fresh memory shows; a one-byte row may be zero by chance, sixteen of them not."""
    assert CODE.rows(0, np.arange(16, dtype=np.int32), row_bytes).any()


@pytest.mark.parametrize("row_bytes", [8, 128, 250, 256, 512, 1024])
def test_nothing_repeats_at_any_distance_up_to_1024_bytes(row_bytes):
    page = CODE.rows(3, np.arange(1000, 1000 + 8192 // row_bytes, dtype=np.int32), row_bytes).reshape(-1)
    for distance in range(1, 1025):
        same = page[distance:] == page[:-distance]
        edges = np.flatnonzero(np.diff(np.concatenate(([0], same.view(np.int8), [0]))))
        longest = int((edges[1::2] - edges[::2]).max(initial=0))
        assert longest < 12, f"{longest} equal bytes in a row at distance {distance}"


def test_seeds_give_different_codes():
    assert rows(0, [0], 512, ByteCode(0)) != rows(0, [0], 512, ByteCode(1))


def test_equal_seeds_give_equal_codes():
    assert rows(4, [9], 512, ByteCode(3)) == rows(4, [9], 512, ByteCode(3))


# ---------------------------------------------------------------------- whole words


planes = st.tuples(
    st.integers(1, 3), st.integers(1, 9), st.integers(1, 80), st.integers(0, 3), resources, contents, st.integers(1, 4)
)


def memory_of(heads: int, row_count: int, words: int, gap: int) -> tuple[np.ndarray, np.ndarray]:
    """Poisoned memory, and the part of it that holds rows, ``gap`` words apart: ``[heads, rows, words]``."""
    memory = np.full((heads, row_count, words + gap), 0xFFFF_FFFF_FFFF_FFFF, np.uint64)
    return memory, memory[:, :, :words]


@settings(max_examples=40)
@given(planes)
@example((8, 128, 64, 0, 8, 300, 1))  # more than one chunk
def test_fill_writes_the_rows_and_matches_agrees(case):
    heads, row_count, words, gap, resource, first, step = case
    memory, part = memory_of(heads, row_count, words, gap)
    CODE.fill(part, resource, first, step)
    assert (memory[:, :, words:] == 0xFFFF_FFFF_FFFF_FFFF).all()
    ids = [first + i * step for i in range(row_count)]
    for number, plane in enumerate(part):
        assert [row.tobytes() for row in plane] == rows(resource + number, ids, words * 8)
    assert CODE.matches(part, resource, first, step)
    assert not CODE.matches(part, resource, first + 1, step)
    assert not CODE.matches(part, resource + 1, first, step)


@settings(max_examples=60)
@given(planes, st.integers(0, 10**9), st.integers(1, 255))
@example((8, 128, 64, 0, 8, 300, 1), 8 * 128 * 512 - 1, 1)
def test_matches_sees_any_single_wrong_byte(case, where, change):
    heads, row_count, words, gap, resource, first, step = case
    _, part = memory_of(heads, row_count, words, gap)
    CODE.fill(part, resource, first, step)
    row = part[where % heads, where // heads % row_count].view(np.uint8)
    byte = where // heads // row_count % (words * 8)
    row[byte] ^= change
    assert not CODE.matches(part, resource, first, step)
    row[byte] ^= change
    assert CODE.matches(part, resource, first, step)


@pytest.mark.parametrize(("row_count", "words"), [(3, RING_WORDS), (2, RING_WORDS + 5), (130, 512), (5, 40_000)])
def test_pages_longer_than_the_ring(row_count, words):
    _, part = memory_of(2, row_count, words, 0)
    CODE.fill(part, 8, 77)
    assert part[1, row_count - 1].tobytes() == naive_row(9, 77 + row_count - 1, words * 8)
    assert CODE.matches(part, 8, 77)
    part[1, row_count - 1, words - 1] ^= np.uint64(1)
    assert not CODE.matches(part, 8, 77)


# ---------------------------------------------------------------------- decoding


@st.composite
def fragments(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(resource, content, first byte, length) of a part of a row that can be named."""
    resource = draw(st.sampled_from(sorted(RESOURCES)))
    length = draw(st.integers(UNIT + HEADER, min(RESOURCES[resource], 2 * UNIT + 40)))
    first = draw(st.integers(0, RESOURCES[resource] - length))
    return resource, draw(st.integers(0, CONTENTS - 1)), first, length


@settings(max_examples=150)
@given(fragments(), st.data())
def test_a_fragment_of_a_unit_and_a_header_names_its_origin_wherever_it_stands(fragment, data):
    resource, content, first, length = fragment
    row_bytes = data.draw(st.integers(length, 700))
    at = data.draw(st.integers(0, row_bytes - length))
    ground = data.draw(st.sampled_from(("poison", "zero", "row", "noise")))
    noise = random.Random(at).randbytes(row_bytes)
    row = bytearray({"poison": b"\xff" * row_bytes, "zero": bytes(row_bytes), "noise": noise}.get(ground, b""))
    row = row or bytearray(naive_row(1, 17, row_bytes))
    row[at : at + length] = naive_row(resource, content, RESOURCES[resource])[first : first + length]
    byte = data.draw(st.integers(0, length - 1))
    prefer = data.draw(st.sampled_from((None, 3)))
    found = CODE.decode(np.frombuffer(bytes(row), np.uint8), at + byte, RESOURCES, CONTENTS, prefer)
    assert found == Decoded(resource, content, first + byte)


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(1, 600), st.sampled_from((255, 250, 3)), st.sampled_from((None, 0, 5, 300)))
def test_random_bytes_name_nobody(seed, row_bytes, highest, prefer):
    rng = np.random.default_rng(seed)
    row = rng.integers(0, highest + 1, row_bytes, dtype=np.uint8)
    assert CODE.decode(row, int(rng.integers(row_bytes)), RESOURCES, CONTENTS, prefer) is None


@pytest.mark.parametrize("value", [0, 1, 97, 250, *POISON_BYTES])
@pytest.mark.parametrize("prefer", [None, 0, 5, 251])
@pytest.mark.parametrize("byte", [0, 100, 511])
def test_one_byte_all_over_names_nobody(value, prefer, byte):
    row = np.full(512, value, np.uint8)
    assert CODE.decode(row, byte, RESOURCES, CONTENTS, prefer) is None


def test_contents_never_given_out_and_resources_not_in_use_are_not_named():
    row = np.frombuffer(naive_row(5, 50, 136), np.uint8)
    assert CODE.decode(row, 60, {5: 136}, 51) == Decoded(5, 50, 60)
    assert CODE.decode(row, 60, {5: 136}, 50) is None
    assert CODE.decode(row, 60, {4: 136}, 51) is None


def test_the_expected_content_names_fragments_too_short_for_a_header():
    """Eight bytes of another layer's row of the same token."""
    row = np.full(64, 0xFF, np.uint8)
    row[20:28] = np.frombuffer(naive_row(250, 33, 300), np.uint8)[200:208]
    assert CODE.decode(row, 22, RESOURCES, CONTENTS) is None
    assert CODE.decode(row, 22, RESOURCES, CONTENTS, prefer=33) == Decoded(250, 33, 202)


@pytest.mark.parametrize("row_bytes", [4, 5, 7])
def test_rows_without_header_are_named_by_the_expected_content(row_bytes):
    row = np.frombuffer(naive_row(9, 33, row_bytes), np.uint8)
    assert CODE.decode(row, 1, {8: row_bytes, 9: row_bytes}, 40) is None
    assert CODE.decode(row, 1, {8: row_bytes, 9: row_bytes}, 40, prefer=33) == Decoded(9, 33, 1)


def test_a_row_longer_than_the_ring_is_named_at_the_right_byte():
    """The body repeats after 262 kB; the header's unit index says which repeat it is."""
    row_bytes = 3 * RING_WORDS * 8
    long = np.frombuffer(naive_row(0, 1, row_bytes), np.uint8)
    first = 2 * RING_WORDS * 8 + 4096
    assert CODE.decode(long[first : first + 1024], 600, {0: row_bytes}, 2) == Decoded(0, 1, first + 600)


def test_a_header_in_small_digits_is_not_taken_for_another_one():
    """A unit index followed by zeros looks like the first header of content 0; more bytes speak for the true place."""
    row = np.zeros(142, np.uint8)
    row[:136] = np.frombuffer(naive_row(0, 0, 512), np.uint8)[:136]
    assert CODE.decode(row, 134, RESOURCES, CONTENTS) == Decoded(0, 0, 134)


def test_bytes_of_two_owners_are_named_each_by_its_own():
    row = np.concatenate([np.frombuffer(naive_row(r, c, 512), np.uint8)[:256] for r, c in ((0, 4), (1, 9))])
    assert CODE.decode(row, 255, RESOURCES, CONTENTS) == Decoded(0, 4, 255)
    assert CODE.decode(row, 256, RESOURCES, CONTENTS) == Decoded(1, 9, 0)


# ---------------------------------------------------------------------- limits and states


def test_limits_name_value_and_limit():
    with pytest.raises(ValueError, match=f"row of 0 bytes, limit {MAX_ROW_BYTES} bytes"):
        rows(0, [0], 0)
    with pytest.raises(ValueError, match=f"row of {MAX_ROW_BYTES + 1} bytes"):
        ByteCode.words_per_row(MAX_ROW_BYTES + 1)
    with pytest.raises(ValueError, match=f"{MAX_RESOURCES + 1} resources, limit {MAX_RESOURCES}"):
        rows(MAX_RESOURCES, [0], 8)
    with pytest.raises(ValueError, match=f"{MAX_CONTENTS + 1} contents, limit {MAX_CONTENTS}"):
        rows(0, [MAX_CONTENTS], 8)
    assert rows(MAX_RESOURCES - 1, [MAX_CONTENTS - 1], 8) == [naive_row(MAX_RESOURCES - 1, MAX_CONTENTS - 1, 8)]


def test_no_rows():
    assert rows(0, [], 16) == []


@given(st.integers(0, MAX_CONTENTS))
def test_optional_states_are_invertible_and_apart_from_fills_and_contents(content):
    state = optional(content)
    assert state < min(Fill)
    assert optional_content(np.array([state], np.int32)).tolist() == [content]


def test_poisons_are_told_apart():
    assert len(POISON_BYTES) == 4
    assert {fill.byte for fill in POISON_BYTES.values()} == set(POISON_BYTES)
