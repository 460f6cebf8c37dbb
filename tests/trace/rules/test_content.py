"""Content mode: each rule where it holds and where it breaks."""

from __future__ import annotations

from typing import Any

import numpy as np
from builders_b import MINE, arrays, ints, judge, never_raises
from hypothesis import given
from hypothesis import strategies as st

from kvproof.trace.records import Content
from kvproof.trace.rules import content

OURS, THEIRS = 0xFEDCBA9876543210, 0x0123456789ABCDEF


def stamps(values: list[int]) -> np.ndarray:
    """Chain values."""
    return np.array(values, np.uint64)


def blocks(**changes: Any) -> Content:
    """Request a reads blocks 5 and 6, request b block 7; one checksum was taken."""
    values: dict[str, Any] = {
        "ids": ["a", "b"],
        "who": ints([0, 0, 1]),
        "group": ints([0, 0, 1]),
        "column": ints([0, 1, 0]),
        "block": ints([5, 6, 7]),
        "expected": stamps([11, OURS, 13]),
        "found": stamps([11, OURS, 13]),
        "writers": {THEIRS: "c"},
        "sum_blocks": [(0, 5, "layers.0")],
        "sums_expected": [0xAB],
        "sums_found": [0xAB],
    }
    return Content(**{**values, **changes})


def test_the_rules_of_the_module() -> None:
    assert [r.name for r in MINE if r.check.__module__ == content.__name__] == [
        "content_stale_reference",
        "content_changed",
    ]


def test_sound_content_breaks_nothing() -> None:
    assert judge(blocks()) == []


def test_unknown_stamps_are_not_judged() -> None:
    """0 means unknown: loaded from outside, or written before the guard looked."""
    assert judge(blocks(expected=stamps([11, 0, 13]))) == []
    assert judge(blocks(found=stamps([11, 0, 13]))) == []


def test_stale_reference_names_the_writer() -> None:
    (found,) = judge(blocks(found=stamps([11, THEIRS, 13])))
    assert (found.rule, found.request, found.group, found.block) == ("content_stale_reference", "a", 0, 6)
    assert found.expected == "stamp fedcba9876543210 in column 1"
    assert found.found == "stamp 0123456789abcdef, written by request c"


def test_stale_reference_of_an_unknown_writer() -> None:
    (found,) = judge(blocks(found=stamps([11, OURS, 14])))
    assert (found.request, found.group, found.block) == ("b", 1, 7)
    assert found.found.endswith("of an unknown writer")


def test_changed_content() -> None:
    (found,) = judge(blocks(sums_found=[0xAC]))
    assert (found.rule, found.request, found.group, found.block) == ("content_changed", None, 0, 5)
    assert (found.expected, found.found) == ("checksum 000000ab in layer layers.0", "checksum 000000ac")


@given(data=st.data())
def test_corrupt_content_never_makes_a_rule_raise(data: st.DataObject) -> None:
    values: dict[str, Any] = {name: data.draw(arrays()) for name in ("who", "group", "column", "block")}
    for name in ("expected", "found"):
        values[name] = stamps(data.draw(st.lists(st.integers(0, 2**64 - 1), max_size=6)))
    sums = st.lists(st.integers(-5, 2**64), max_size=3)
    never_raises(blocks(**values, sums_expected=data.draw(sums), sums_found=data.draw(sums)))
