"""What a rule is, and the registry of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule at one place. ``expected`` and ``found`` carry their unit in words.

    ``slot``, ``position`` (tokens), ``block`` and ``group`` are None where the rule has no such place.
    """

    rule: str
    expected: str
    found: str
    request: str | None = None
    group: int | None = None
    block: int | None = None
    slot: int | None = None
    position: int | None = None

    def where(self) -> str:
        """The place in words."""
        parts = [
            f"request {self.request}" if self.request is not None else "",
            f"group {self.group}" if self.group is not None else "",
            f"block {self.block}" if self.block is not None else "",
            f"slot {self.slot}" if self.slot is not None else "",
            f"position {self.position}" if self.position is not None else "",
        ]
        return ", ".join(part for part in parts if part) or "the whole step"

    def __str__(self) -> str:
        return f"{self.rule}: {self.where()}: expected {self.expected}, found {self.found}"


Check = Callable[[Any], Iterable[Violation]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. ``predicate`` is what holds when all is well; ``fields`` the native fields it is judged from.

    ``needs`` names record attributes: when one is None the rule is skipped and counted. ``skips`` says in words when
    it does not apply. ``yields_to`` names more specific rules: a finding of theirs for the same request and group in
    the same record silences this one.
    """

    name: str
    family: str
    boundary: str
    record: type
    predicate: str
    fields: tuple[str, ...]
    check: Check
    needs: tuple[str, ...] = ()
    skips: str = ""
    yields_to: tuple[str, ...] = ()
    meaning: str = ""


REGISTERED: dict[str, Rule] = {}
"""Rules as their modules define them; ``catalogue.RULES`` is the ordered whole."""


def rule(
    record: type,
    *,
    family: str,
    boundary: str,
    predicate: str,
    fields: tuple[str, ...],
    needs: tuple[str, ...] = (),
    skips: str = "",
    yields_to: tuple[str, ...] = (),
    meaning: str = "",
) -> Callable[[Check], Check]:
    """Register the decorated function under its own name.

    ``meaning`` says in one sentence for a reader of the log what has happened when the rule fires.
    """

    def register(check: Check) -> Check:
        name = check.__name__
        if name in REGISTERED:
            raise RuntimeError(f"rule {name} is registered twice")
        REGISTERED[name] = Rule(
            name, family, boundary, record, predicate, fields, check, needs, skips, yields_to, meaning
        )
        return check

    return register


LIMIT = 8
"""Findings one rule reports per record: the first are enough to act on, and a broken step must not flood the log."""
