"""What the ledger says about single, hand-made accidents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.bytecode import ByteCode, Decoded, Fill, Ledger
from kvproof.bytecode.code import optional
from kvproof.bytecode.ledger import MAX_RUNS, Judged
from kvproof.layout import Axis, Field, Group, Layout, Resource, Storage

BLOCKS, TOKENS, HEADS, CELL = 5, 8, 2, 256
PAGE = TOKENS * HEADS * CELL
KV = (Field("K", 0, CELL // 2), Field("V", CELL // 2, CELL))


def two_layers(head_major: bool = True, padding: int = 0, tokens_per_row: int = 1) -> Layout:
    """Layers 0 and 1 of one group, one after the other; pages of 8 tokens, 2 heads, 256 bytes."""
    stride = PAGE + padding
    rows, cells = (Axis(TOKENS, CELL),), (Axis(HEADS, TOKENS * CELL), Axis(CELL, 1))
    if not head_major:
        rows, cells = (Axis(TOKENS, HEADS * CELL),), (Axis(HEADS, CELL), Axis(CELL, 1))
    resources = tuple(
        Resource(i, 0, f"layer.{i}", "uint8", 0, i * BLOCKS * stride, stride, stride, rows, cells, tokens_per_row, KV)
        for i in range(2)
    )
    group = Group(0, "full_attention", TOKENS * tokens_per_row, ("layer.0", "layer.1"), "all")
    return Layout("LBHNC", BLOCKS, (Storage(0, 2 * BLOCKS * stride),), (group,), resources)


class World:
    """A painted ledger whose block 3 holds tokens 0 ... 7 and block 1 tokens 8 ... 15."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.memory = np.zeros(layout.storages[0].nbytes, np.uint8)
        self.ledger = Ledger(layout, ByteCode(5), [self.memory])
        self.ledger.paint()
        self.ledger.allocate(0, (3, 1), Fill.UNCOMPUTED)
        step = layout.resources[0].tokens_per_row
        for r in layout.resources:
            for number, block in enumerate((3, 1)):
                first = number * TOKENS * step
                contents = np.arange(first, first + TOKENS * step, step, dtype=np.int32)
                self.ledger.write(r, block, 0, contents)

    def page(self, resource: int, block: int) -> np.ndarray:
        r = self.layout.resources[resource]
        return self.memory[r.offset + block * r.block_stride :][: r.page_bytes]

    def one_mismatch(self):
        (mismatch,), _ = self.ledger.judge()
        return mismatch


@pytest.fixture(params=[True, False], ids=["head-major", "token-major"])
def world(request):
    return World(two_layers(request.param))


def test_a_clean_memory_has_no_mismatch_and_is_judged_whole(world):
    found, judged = world.ledger.judge()
    assert found == []
    assert judged == Judged(world.memory.nbytes, 2 * BLOCKS, {0, 1}, set(range(BLOCKS)))


def test_exchanged_layers_name_each_other(world):
    world.page(0, 3)[:], world.page(1, 3)[:] = world.page(1, 3).copy(), world.page(0, 3).copy()
    found, _ = world.ledger.judge()
    assert [(m.layer, m.block, m.page_byte, m.decoded) for m in found] == [
        ("layer.0", 3, found[0].page_byte, Decoded(1, 0, found[0].row_byte)),
        ("layer.1", 3, found[1].page_byte, Decoded(0, 0, found[1].row_byte)),
    ]
    assert found[0].counts.keys() == {"foreign"}
    assert found[0].wrong_bytes > PAGE * 0.9


def test_a_block_of_another_token_names_token_and_byte(world):
    world.page(1, 1)[:] = world.page(1, 3)
    m = world.one_mismatch()
    assert (m.resource, m.block, m.row, m.expected) == (1, 1, 0, 8)
    assert m.decoded == Decoded(1, 0, m.row_byte)


def test_a_swap_at_distance_251_is_seen_and_named(world):
    page = world.page(0, 3)
    page[:-251] = page[251:].copy()
    m = world.one_mismatch()
    assert m.decoded is not None
    row, row_byte = world.layout.resources[0].locate(m.page_byte + 251)
    assert m.decoded == Decoded(0, row, row_byte)


@pytest.mark.parametrize(("value", "state"), [
    (0, "zero"), (255, "poison_target"), (254, "poison_uncomputed"), (253, "poison_free"), (252, "poison_null"),
])  # fmt: skip
def test_what_stands_there_is_named(world, value, state):
    world.page(0, 3)[512:1024] = value
    m = world.one_mismatch()
    assert m.counts.keys() <= {state, "foreign"}
    assert m.counts[state] >= 450
    assert (m.page_byte, m.observed, m.decoded) == (512, value, None)
    assert next(run[0] for run in m.wrong if run[2] == state) == 512


def test_one_zero_among_foreign_bytes_is_foreign(world):
    page = world.page(0, 3)
    page[10:20] = 251
    page[14] = 0
    assert world.one_mismatch().counts == {"foreign": 10}


@pytest.mark.parametrize(("block", "fill"), [(0, Fill.NULL), (2, Fill.FREE)])
def test_a_write_into_nobodys_block_is_named(world, block, fill):
    world.page(1, block)[520:1220] = world.page(0, 3)[520:1220]
    m = world.one_mismatch()
    assert (m.layer, m.block, m.page_byte, m.expected, m.wrong_bytes) == ("layer.1", block, 520, fill, 700)
    assert m.decoded is not None
    assert m.decoded.resource == 0
    world.ledger.taint(m)
    assert world.ledger.judge()[0] == []
    assert (world.page(1, block) == fill.byte).all()


@pytest.mark.parametrize(("block", "fill"), [(0, Fill.NULL), (2, Fill.FREE)])
@pytest.mark.parametrize("first", [0, 300, 1024])
def test_a_block_of_nobody_is_named_page_by_page(block, fill, first):
    """K, V and padding in the frame of a state, as vllm-ascend lays a hybrid model: each is named for itself."""

    def part(number: int, group: int, name: str, offset: int, page: int, rows: int, size: int) -> Resource:
        return Resource(
            number, group, "attn" if group == 0 else "mamba", "uint8", 0, offset, 2100, page, (Axis(rows, size),),
            (Axis(size, 1),), int(group == 0), (Field(name, 0, size),),
        )  # fmt: skip

    kv = part(0, 0, "K", 0, 1024, 4, 256), part(1, 0, "V", 1024, 1076, 4, 256)
    states = part(2, 1, "conv", 0, 100, 1, 100), part(3, 1, "ssm", 100, 2000, 1, 900)
    groups = (Group(0, "full_attention", 4, ("attn",), "all"), Group(1, "mamba", 4, ("mamba",), "state"))
    memory = np.zeros(3 * 2100, np.uint8)
    ledger = Ledger(Layout("LBNHC", 3, (Storage(0, memory.size),), groups, (*kv, *states)), ByteCode(3), [memory])
    ledger.paint()
    ledger.allocate(0, [1], Fill.UNCOMPUTED)
    for r in kv:
        ledger.write(r, 1, 0, np.arange(4, dtype=np.int32))
    frames = memory.reshape(3, 2100)
    frames[block, first:2048] = frames[1, first:2048]
    frames[block, 2090:] = 7
    found, _ = ledger.judge()
    named = [(m.resource, m.page_byte, m.wrong_bytes, m.decoded.resource if m.decoded else None) for m in found]
    k = [(0, first, 1024 - first, 0)] if first < 1024 else []
    assert named == [*k, (1, 0, 1024, 1), (None, 2090, 10, None)]
    assert {(m.group, m.layer, m.block, m.expected) for m in found} == {(0, "attn", block, fill)}
    ledger.taint(found[0])
    assert ledger.judge()[0] == []


def test_a_write_into_padding_is_named_and_painted_over():
    world = World(two_layers(padding=24))
    world.page(0, 3)[PAGE + 3 : PAGE + 10] = 0
    m = world.one_mismatch()
    assert (m.group, m.layer, m.resource, m.block, m.page_byte) == (0, "layer.0", None, 3, PAGE + 3)
    assert m.wrong == ((PAGE + 3, 7, "zero"),)
    world.ledger.taint(m)
    assert world.ledger.judge()[0] == []


def test_padding_of_zeroed_pages_may_be_zero_and_nothing_else():
    world = World(two_layers(padding=24))
    world.ledger.zeroed_padding = True
    world.page(0, 3)[PAGE + 3 : PAGE + 10] = 0
    assert world.ledger.judge()[0] == []
    world.page(0, 3)[PAGE + 5] = 1
    m = world.one_mismatch()
    assert (m.resource, m.block, m.page_byte, sum(length for _, length, _ in m.wrong)) == (None, 3, PAGE + 5, 1)


def test_the_padding_behind_the_second_state_of_a_layer_counts_from_the_layers_page():
    def state(number: int, group: int, layer: str, offset: int, used: int, page: int) -> Resource:
        return Resource(number, group, layer, "uint8", 0, offset, 64, page, (Axis(1, 0),), (Axis(used, 1),), 0, ())

    resources = (state(0, 0, "attn", 0, 64, 64), state(1, 1, "mamba", 0, 16, 16), state(2, 1, "mamba", 16, 32, 48))
    groups = (Group(0, "a", 1, ("attn",), "all"), Group(1, "m", 1, ("mamba",), "state"))
    memory = np.zeros(192, np.uint8)
    ledger = Ledger(Layout("LBNHC", 3, (Storage(0, 192),), groups, resources), ByteCode(0), [memory])
    ledger.paint()
    ledger.allocate(1, [2], Fill.TARGET)
    assert ledger.judge()[0] == []
    memory[2 * 64 + 50] = 9
    (m,), _ = ledger.judge()
    assert (m.group, m.layer, m.resource, m.page_byte) == (1, "mamba", None, 50)


def test_a_tainted_page_is_quiet_until_it_is_written_again(world):
    page = world.page(0, 3)
    page[:] = 7
    m = world.one_mismatch()
    world.ledger.taint(m)
    found, judged = world.ledger.judge()
    assert found == []
    assert judged.bytes == world.memory.nbytes - PAGE
    r = world.layout.resources[0]
    world.ledger.write(r, 3, 0, np.arange(TOKENS, dtype=np.int32))
    page[5] ^= 1
    assert world.one_mismatch().page_byte == 5


def test_rows_nobody_judges_are_not_counted(world):
    r = world.layout.resources[0]
    world.ledger.mark(r, 3, Fill.ANY, 2, 4)
    world.page(0, 3)[:] = world.page(0, 3)
    _, judged = world.ledger.judge_rows(r, {3: (0, TOKENS), 1: (1, 3)})
    assert judged == Judged((TOKENS - 2 + 2) * r.row_bytes, 2, {0}, {1, 3})


def test_an_expected_row_that_never_came_is_still_poison(world):
    r = world.layout.resources[1]
    world.ledger.allocate(0, [2], Fill.TARGET)
    world.ledger.expect(r, 2, 0, np.arange(3, dtype=np.int32))
    m = world.one_mismatch()
    assert (m.layer, m.block, m.row, m.expected, m.observed) == ("layer.1", 2, 0, 0, 255)
    assert m.counts == {"poison_target": 3 * r.row_bytes}


@pytest.mark.parametrize("loaded", [0, 3, TOKENS])
def test_an_optional_row_may_be_there_or_still_be_poison(world, loaded):
    r = world.layout.resources[1]
    ids = np.arange(TOKENS, dtype=np.int32)
    world.ledger.allocate(0, [2], Fill.TARGET)
    world.ledger.write(r, 2, 0, ids[:loaded])
    world.ledger.expect(r, 2, 0, np.array([optional(int(c)) for c in ids], np.int32))
    assert world.ledger.judge()[0] == []
    world.page(1, 2)[300] = 254
    assert world.one_mismatch().counts == {"poison_uncomputed": 1}


@pytest.mark.parametrize("value", [0, 255])
def test_a_block_the_runner_zeroes_may_be_zero_or_poison(world, value):
    world.ledger.allocate(0, [2], Fill.TARGET)
    for r in world.layout.resources:
        world.ledger.mark(r, 2, Fill.ZEROED_OR_POISON)
    world.page(0, 2)[:] = value
    assert world.ledger.judge()[0] == []
    world.page(0, 2)[:9] = 1
    assert world.one_mismatch().counts == {"foreign": 9}


def test_compressed_rows_whose_contents_grow_by_more_than_one():
    world = World(two_layers(tokens_per_row=4))
    assert world.ledger.judge()[0] == []
    assert world.ledger.name_of(world.layout.resources[1], 1, 5) == (1, TOKENS * 4 + 5 * 4)
    world.page(1, 1)[1000] ^= 1
    assert world.one_mismatch().page_byte == 1000


def test_more_runs_than_are_worth_it_are_still_compared():
    tokens = 2 * MAX_RUNS + 3
    r = Resource(0, 0, "a", "uint8", 0, 0, tokens * 8, tokens * 8, (Axis(tokens, 8),), (Axis(8, 1),), 1, ())
    layout = Layout("LBNHC", 2, (Storage(0, 2 * tokens * 8),), (Group(0, "a", tokens, ("a",), "all"),), (r,))
    memory = np.zeros(layout.storages[0].nbytes, np.uint8)
    ledger = Ledger(layout, ByteCode(0), [memory])
    ledger.paint()
    ledger.allocate(0, [1], Fill.TARGET)
    ledger.write(r, 1, 0, np.arange(tokens, dtype=np.int32)[::-1].copy())
    assert ledger.judge()[0] == []
    memory[-1] ^= 1
    assert [m.row for m in ledger.judge()[0]] == [tokens - 1]


def test_rows_name_themselves(world):
    for r in world.layout.resources:
        assert [world.ledger.name_of(r, 1, row) for row in range(TOKENS)] == [(r.id, 8 + row) for row in range(TOKENS)]
    world.page(0, 1)[:] = 253
    assert world.ledger.name_of(world.layout.resources[0], 1, 0) == (-1, -1)


def test_rows_too_short_for_a_name():
    r = Resource(0, 0, "a", "uint8", 0, 0, 12, 12, (Axis(3, 4),), (Axis(4, 1),), 1, ())
    layout = Layout("LBNHC", 2, (Storage(0, 24),), (Group(0, "a", 3, ("a",), "all"),), (r,))
    ledger = Ledger(layout, ByteCode(0), [np.zeros(24, np.uint8)])
    assert ledger.name_of(r, 1, 0) is None


def test_what_the_null_block_and_blocks_outside_may_not_do(world):
    r, ids = world.layout.resources[0], np.arange(1, dtype=np.int32)
    for act in (
        lambda block: world.ledger.allocate(0, [block], Fill.TARGET),
        lambda block: world.ledger.expect(r, block, 0, ids),
        lambda block: world.ledger.write(r, block, 0, ids),
        lambda block: world.ledger.judge_rows(r, {block: (0, 1)}),
    ):
        with pytest.raises(ValueError, match="null block holds nobody's rows, block 0"):
            act(0)
        for outside in (-1, BLOCKS):
            with pytest.raises(ValueError, match=f"block {outside}, limit {BLOCKS} blocks"):
                act(outside)


@pytest.mark.parametrize(("first", "count"), [(TOKENS, 1), (TOKENS - 1, 2), (-1, 1)])
def test_rows_outside_the_page_are_refused(world, first, count):
    with pytest.raises(ValueError, match=f"rows {first} to {first + count} of resource 1, limit {TOKENS} rows"):
        world.ledger.expect(world.layout.resources[1], 3, first, np.arange(count, dtype=np.int32))


def test_writing_no_rows_is_nothing(world):
    world.ledger.write(world.layout.resources[0], 3, 4, np.empty(0, np.int32))
    assert world.ledger.judge()[0] == []


def test_as_many_memories_as_storages():
    with pytest.raises(ValueError, match="2 memories for 1 storages"):
        Ledger(two_layers(), ByteCode(0), [np.zeros(8, np.uint8)] * 2)


def test_a_block_handed_on_forgets_its_rows(world):
    world.ledger.allocate(0, [3], Fill.TARGET)
    assert (world.page(0, 3) == 255).all()
    assert world.ledger.judge()[0] == []


@settings(max_examples=25)
@given(st.integers(0, 1), st.integers(1, BLOCKS - 1), st.integers(0, PAGE - 1), st.integers(1, 255), st.booleans())
def test_one_flipped_byte_is_found_at_its_place(resource, block, byte, change, head_major):
    world = World(two_layers(head_major))
    world.page(resource, block)[byte] ^= change
    m = world.one_mismatch()
    r = world.layout.resources[resource]
    assert (m.layer, m.block, m.page_byte, m.wrong_bytes) == (r.layer, block, byte, 1)
    assert (m.row, m.row_byte) == r.locate(byte)
