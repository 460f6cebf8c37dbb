"""The catalogue as a document: complete, named, and printed in docs/faults.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvproof.engine.connectors import PROFILES
from kvproof.faults.catalogue import CATALOGUE, KINDS, select
from kvproof.faults.document import document
from kvproof.faults.model import Fault
from kvproof.faults.stories import STORIES
from kvproof.oracles.registry import ORACLES
from kvproof.zoo import names

DOCS = Path(__file__).parents[2] / "docs"


def leaves(cls: type[Fault]) -> set[type[Fault]]:
    below = cls.__subclasses__()
    return {cls} if not below else set().union(*(leaves(c) for c in below))


def test_there_are_enough_and_none_is_forgotten() -> None:
    assert len(CATALOGUE) == sum(len(faults) for faults in KINDS.values()) >= 34
    assert leaves(Fault) == set(CATALOGUE.values())


@pytest.mark.parametrize("fault", CATALOGUE.values(), ids=list(CATALOGUE))
def test_a_fault_says_what_it_is(fault: type[Fault]) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z0-9]+)*", fault.name())
    assert fault.__doc__
    assert fault.summary().endswith(".")
    assert fault.stands_for
    assert all(re.fullmatch(r"A[0-9]{2}", kind) for kind in fault.stands_for)
    assert fault.oracle in ORACLES
    assert fault.story in STORIES
    assert fault.model in names()
    assert set(fault.unfit) <= set(PROFILES)


def test_every_oracle_is_needed_by_some_fault() -> None:
    assert {f.oracle for f in CATALOGUE.values()} == set(ORACLES)


def test_selection() -> None:
    assert select([]) == list(CATALOGUE.values())
    assert [f.name() for f in select(["swap-at-256", "swap-at-251"])] == ["swap-at-251", "swap-at-256"]
    with pytest.raises(ValueError, match="--only swap-at-252: not one of the"):
        select(["swap-at-252"])


def test_the_page_is_current() -> None:
    page = (DOCS / "faults.md").read_text(encoding="utf-8")
    assert page == document(), "run: python -m kvproof.faults.document > docs/faults.md"
