"""Dummy runs: each rule where it holds and where it breaks."""

from __future__ import annotations

from typing import Any

import numpy as np
from builders_b import MINE, arrays, ints, judge, names, never_raises
from hypothesis import given
from hypothesis import strategies as st

from kvproof.trace.records import Dummy
from kvproof.trace.rules import dummy


def run(**changes: Any) -> Dummy:
    """A run of 3 tokens and 2 requests over two groups; the second has no slots."""
    values: dict[str, Any] = {
        "slots": [np.full(3, -1), None],
        "buffers": [np.full(8, -1), None],
        "tables": [np.zeros((2, 4), np.int32), np.zeros((2, 1), np.int32)],
        "connector_disabled": True,
    }
    return Dummy(**{**values, **changes})


def test_the_rules_of_the_module() -> None:
    assert [r.name for r in MINE if r.check.__module__ == dummy.__name__] == [
        "dummy_slot_not_pad",
        "dummy_persistent_slot_not_pad",
        "dummy_block_row_not_null",
        "dummy_connector_enabled",
    ]


def test_a_sound_run_breaks_nothing() -> None:
    assert judge(run()) == []
    assert judge(run(connector_disabled=None)) == []
    assert judge(run(slots=[ints([]), None], tables=[np.zeros((0, 0), np.int32), None])) == []


def test_slot_of_the_run() -> None:
    buffer = ints([-1, 77, 78, -1])
    (found,) = judge(run(slots=[buffer[:3], None], buffers=[buffer, None]))
    assert (found.rule, found.group, found.slot) == ("dummy_slot_not_pad", 0, 77)
    assert found.found == "slot 77 in entry 1, and 1 more entries"


def test_slot_behind_the_run() -> None:
    (found,) = judge(run(buffers=[None, ints([-1, -1, -1, -1, 5])]))
    assert (found.rule, found.group, found.slot) == ("dummy_persistent_slot_not_pad", 1, 5)
    assert found.found == "slot 5 in entry 4"


def test_block_row() -> None:
    table = np.zeros((2, 4), np.int32)
    table[1, 2] = 9
    (found,) = judge(run(tables=[None, table]))
    assert (found.rule, found.group, found.block) == ("dummy_block_row_not_null", 1, 9)
    assert (found.expected, found.found) == ("block 0 in row 1, column 2", "block 9")


def test_state_rows() -> None:
    """Where the caller asks for distinct state slots, column 0 counts from 1 and everything else stays null."""
    table = np.zeros((3, 2), np.int32)
    table[:, 0] = [1, 2, 3]
    assert judge(run(tables=[table], state_rows=True)) == []
    assert names(run(tables=[table])) == ["dummy_block_row_not_null"]
    table[1, 0] = 3
    (found,) = judge(run(tables=[table], state_rows=True))
    assert (found.expected, found.found) == ("block 2 in row 1, column 0", "block 3")


def test_connector() -> None:
    (found,) = judge(run(connector_disabled=False))
    assert (found.rule, found.where()) == ("dummy_connector_enabled", "the whole step")


@given(
    slots=st.lists(st.none() | arrays()),
    buffers=st.lists(st.none() | arrays()),
    tables=st.lists(st.none() | arrays() | arrays().map(lambda a: a.reshape(-1, 1))),
    state_rows=st.booleans(),
)
def test_corrupt_runs_never_make_a_rule_raise(slots: Any, buffers: Any, tables: Any, state_rows: bool) -> None:
    never_raises(Dummy(slots, buffers, tables, state_rows, False))
