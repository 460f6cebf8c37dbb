"""Every fault of a transfer, on a memory of a few kilobytes: it does harm, and the witness sees exactly that harm."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from fake_ground import CELL, COLD, HEADS, LAYERS, PAGE, ROWS, FakeGround, with_local
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproof.faults.catalogue import CATALOGUE
from kvproof.faults.contents import exchange_at, exchange_halves, planes_as_heads, through_float16
from kvproof.faults.model import DENSE, Fault
from kvproof.faults.pages import Pages, Place, bytes_at
from kvproof.faults.transfer import LOAD, SAVE, batch_of, runs, whole
from kvproof.layout import Axis, Field, Group, Layout, Resource, Storage

NUM_BLOCKS = 12
MOVING = [
    fault
    for fault in CATALOGUE.values()
    if fault.model == DENSE
    and fault.story == "repeat"
    and fault.oracle not in ("hit_length", "lifecycle", "legality")
    and fault.name() not in ("load-behind-hit",)  # needs a table that goes on behind the hit
]
LUCK = ("blocks-counted-up-on-load", "blocks-counted-up-on-save", "rows-turned-by-block", "page-too-large")
"""Harmless for some tables: they happen to count up, agree in their ids, or lie before a page that is loaded next."""


@st.composite
def grounds(draw: st.DrawFn) -> FakeGround:
    """Disjoint tables of 2 to 4 blocks each, in any order, the null block in none."""
    blocks = draw(st.permutations(range(1, NUM_BLOCKS)))
    length = draw(st.integers(2, 4))
    return FakeGround(NUM_BLOCKS, list(blocks[:length]), list(blocks[length : 2 * length]), draw(st.integers(0, 99)))


@given(ground=grounds())
def test_a_fault_that_does_nothing_leaves_nothing_wrong(ground: FakeGround) -> None:
    assert ground.tell(Fault()) is None
    assert ground.witness.wrong == []


@pytest.mark.parametrize("fault", MOVING, ids=lambda f: f.name())
@settings(max_examples=15, deadline=None)
@given(ground=grounds())
def test_every_fault_does_harm_where_it_says(fault: type[Fault], ground: FakeGround) -> None:
    place = ground.tell(fault())
    if place is None:
        assert fault.name() in LUCK
        return
    meant = set(ground.tables["story/again#2"])
    assert (place.block not in meant) == fault.stray
    r = next(r for r in ground.pages.layout.resources if r.layer == place.layer)
    located = r.locate(place.byte)
    assert located is not None
    assert place.resource == r.field_at(located[1])


@given(ground=grounds(), layer=st.integers(0, 2), index=st.integers(0, 1), byte=st.integers(0, PAGE - 1))
def test_the_witness_names_a_single_wrong_byte(ground: FakeGround, layer: int, index: int, byte: int) -> None:
    transfer = ground.transfer(SAVE)
    with ground.witness.watch(transfer):
        ground.copy(SAVE, transfer.moves)
    transfer = ground.transfer(LOAD)
    block = ground.tables["story/again#2"][index]
    with ground.witness.watch(transfer):
        ground.copy(LOAD, transfer.moves)
        bytes_at(ground.pages.address(layer, block), PAGE)[byte] ^= 1
    field = "K" if byte % CELL < CELL // 2 else "V"
    assert [w.place for w in ground.witness.wrong] == [Place(0, LAYERS[layer], field, block, byte)]
    assert not ground.witness.wrong[0].stray


def test_the_witness_calls_a_byte_outside_the_load_stray() -> None:
    ground = FakeGround(NUM_BLOCKS, [1, 3], [5, 7])
    with ground.witness.watch(ground.transfer(LOAD)):
        ground.copy(LOAD, ground.transfer(LOAD).moves)
        bytes_at(ground.pages.address(1, 0), PAGE)[3] ^= 1
    assert [(w.place, w.stray) for w in ground.witness.wrong] == [(Place(0, LAYERS[1], "K", 0, 3), True)]


def test_what_is_replaced_before_it_is_read_is_not_wrong() -> None:
    ground = FakeGround(NUM_BLOCKS, [1, 3], [5, 7])
    with ground.witness.watch(ground.transfer(LOAD), frozenset({0})):
        ground.copy(LOAD, ground.transfer(LOAD).moves)
        for block in (0, 2):
            bytes_at(ground.pages.address(1, block), PAGE)[3] ^= 1
    assert [w.place for w in ground.witness.wrong] == [Place(0, LAYERS[1], "K", 2, 3)]


@given(
    ground=grounds(),
    cuts=st.lists(st.integers(1, PAGE - 1), max_size=3, unique=True),
    direction=st.sampled_from([LOAD, SAVE]),
)
def test_parts_of_a_page_are_one_move_again(ground: FakeGround, cuts: list[int], direction: str) -> None:
    moves = list(ground.transfer(direction).moves)
    bounds = [0, *sorted(cuts), PAGE]
    parts = [m.part(a, b - a) for m in moves for a, b in itertools.pairwise(bounds)]
    assert whole(parts) == moves
    assert whole(moves) == moves  # neighbours in another block, or of another layer, stay moves of their own
    apart = [dataclasses.replace(m, store=m.store + n) for n, m in enumerate(parts)]
    assert whole(apart) == apart  # the store has something between them


def test_only_the_first_wrong_transfer_counts() -> None:
    ground = FakeGround(NUM_BLOCKS, [1, 3], [5, 7])
    ground.tell(CATALOGUE["layer-never-loaded"]())
    first = list(ground.witness.wrong)
    with ground.witness.watch(ground.transfer(LOAD)):
        bytes_at(ground.pages.address(0, 0), PAGE)[0] ^= 1
    assert ground.witness.wrong == first


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("layer-never-loaded", Place(0, "layer.1", "K", 5, 0)),
        ("page-too-small", Place(0, "layer.0", "K", 5, PAGE - CELL)),
        ("last-value-not-loaded", Place(0, "layer.1", "V", 5, PAGE - CELL // 2)),
        ("block-off-by-one-on-load", Place(0, "layer.0", "K", 5, 0)),
        ("null-block-written", Place(0, "layer.1", "K", 0, 0)),
        ("free-block-written", Place(0, "layer.1", "K", 2, 0)),
        ("bit-flipped", Place(0, "layer.1", "K", 5, PAGE // 2 + 5)),
        ("save-writes-source", Place(0, "layer.1", "V", 1, PAGE - 1)),
    ],
)
def test_places_worked_out_by_hand(name: str, place: Place) -> None:
    assert FakeGround(NUM_BLOCKS, [1, 3], [5, 7], seed=3).tell(CATALOGUE[name]()) == place


def test_a_batch_has_the_direction_of_its_transfer() -> None:
    ground = FakeGround(NUM_BLOCKS, [1, 3], [5, 7])
    moves = ground.transfer(SAVE).moves
    save, load = batch_of(SAVE, moves), batch_of(LOAD, moves)
    assert save.sources.tolist() == load.targets.tolist() == [m.kv for m in moves]
    assert save.targets.tolist() == load.sources.tolist() == [m.store for m in moves]


def test_runs_are_the_moves_of_one_request_and_layer() -> None:
    transfer = FakeGround(NUM_BLOCKS, [1, 3, 4], [5, 7, 9]).transfer(LOAD)
    assert [[m.block for m in run] for run in runs(transfer.moves)] == [[5, 7, 9]] * len(LAYERS)


def test_held_loads_arrive_layer_by_layer() -> None:
    ground = FakeGround(NUM_BLOCKS, [1, 3], [5, 7])
    fault = CATALOGUE["load-behind-reader"]()
    fault.carry(ground.transfer(LOAD), ground)
    assert ground.executed == []
    fault.after_read(LAYERS[1], ground)
    assert {m.layer for _, m in ground.executed} == {LAYERS[1]}


def test_a_rewrite_with_equal_bytes_changes_nothing_and_is_illegal() -> None:
    ground = FakeGround(NUM_BLOCKS, [1, 3], [5, 7])
    ground.tell(Fault())
    ground.executed.clear()
    transfer = with_local(ground.transfer(LOAD), ROWS)
    external = type(transfer)(LOAD, tuple(m for m in transfer.moves if m.owner is not None and m.owner.index))
    with ground.witness.watch(external):
        CATALOGUE["cached-block-rewritten-equal"]().carry(external, ground)
    assert ground.witness.wrong == []
    assert {m.kv for _, m in ground.executed} - {m.kv for m in external.moves} == {ground.pages.address(1, 5)}


# ---------------------------------------------------------------------- functions of one page

PAGES = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).integers(0, 251, (ROWS, HEADS, CELL), dtype=np.uint8)
)


@given(cells=PAGES)
def test_exchanging_halves_twice_is_nothing(cells: np.ndarray) -> None:
    once = exchange_halves(cells)
    assert (exchange_halves(once) == cells).all()
    assert (once[..., : CELL // 2] == cells[..., CELL // 2 :]).all()


@given(cells=PAGES)
def test_planes_taken_for_heads_keep_every_byte_and_the_first_k(cells: np.ndarray) -> None:
    read = planes_as_heads(cells)
    assert sorted(read.reshape(-1)) == sorted(cells.reshape(-1))
    assert (read[0, 0, : CELL // 2] == cells[0, 0, : CELL // 2]).all()
    # Row 0's second head is looked for where row 0's first head keeps its V: the ambiguity in one line.
    assert (read[0, 1, : CELL // 2] == cells[0, 0, CELL // 2 :]).all()


@given(cells=PAGES, distance=st.sampled_from([251, 256]))
def test_a_swap_moves_eight_bytes_and_undoes_itself(cells: np.ndarray, distance: int) -> None:
    page = cells.reshape(-1).copy()
    exchange_at(page, distance)
    moved = np.flatnonzero(page != cells.reshape(-1))
    assert set(moved.tolist()) <= {*range(16, 24), *range(16 + distance, 24 + distance)}
    exchange_at(page, distance)
    assert (page == cells.reshape(-1)).all()


@given(cells=PAGES)
def test_half_precision_loses_once(cells: np.ndarray) -> None:
    once = through_float16(cells.reshape(-1))
    twice = through_float16(once.copy())
    numbers = (once.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert (twice.view(np.uint16) == once.view(np.uint16))[~np.isnan(numbers)].all()


def test_numbers_both_formats_know_survive() -> None:
    numbers = np.array([0.0, 1.0, -2.5, 96.0], np.float32)
    page = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    assert (through_float16(page) == page).all()


def test_stored_finds_the_page_of_another_request_by_its_label() -> None:
    ground = FakeGround(NUM_BLOCKS, [1, 3], [5, 7])
    ground.tell(Fault())
    move = ground.transfer(LOAD).moves[1]
    address = ground.stored("cold", move)
    assert address is not None
    assert (bytes_at(address, PAGE) == bytes_at(ground.pages.address(0, ground.tables[COLD][1]), PAGE)).all()
    assert ground.stored("nobody", move) is None


def test_a_range_covers_the_frames_of_every_byte_in_it():
    """K and V of a block side by side, as vllm-ascend lays them: a move over both means both."""
    rng = np.random.default_rng(11)
    for _ in range(60):
        k, v, gap, blocks = (int(n) for n in (*rng.integers(1, 5, 3), rng.integers(1, 6)))
        stride = k + v + gap
        parts = [(0, k), (k, v)]
        resources = tuple(
            Resource(
                i, 0, "l", "uint8", 0, offset, stride, size, (Axis(1, 0),), (Axis(size, 1),), 1, (Field("f", 0, size),)
            )
            for i, (offset, size) in enumerate(parts)
        )  # fmt: skip
        memory = np.zeros(blocks * stride, np.uint8)
        group = Group(0, "full_attention", 1, ("l",), "all")
        layout = Layout("LBNHC", blocks, (Storage(0, memory.size),), (group,), resources)
        pages = Pages(layout, [memory], [1000])
        start, nbytes = int(rng.integers(0, memory.size)), int(rng.integers(1, memory.size + 1))
        nbytes = min(nbytes, memory.size - start)
        spots = [pages.find(1000 + at) for at in range(start, start + nbytes)]
        expected = {(s.family, s.block) for s in spots if s is not None} if spots[0] is not None else set()
        assert pages.covered(1000 + start, nbytes) == expected
