"""The findings in the order in which a person should meet them, those that are alike told once.

``Report.findings`` keeps the order in which the oracles are defined. A person who reads ten lines needs another: one
finding of each sort, and those that know whose bytes stand in a place before those that only know that they are wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvproof.findings.model import Finding
from kvproof.findings.text import printable
from kvproof.layout.kinds import described


@dataclass(frozen=True)
class Alike:
    """Findings of one oracle and kind that say the same of different places; ``first`` is told in full."""

    first: Finding
    more: tuple[Finding, ...] = ()

    @property
    def words(self) -> str:
        """``more`` in words: ``and 124 more like it: model.layers.2.attn K and V, blocks 3, 7, 9``; empty for none."""
        if not self.more:
            return ""
        places = [f.location for f in self.more if f.location]
        parts = []
        if places:
            known = dict.fromkeys(f.location.resource for f in (self.first, *self.more) if f.location)
            fields = [name for name in known if name in {p.resource for p in places}]
            both = " and ".join(filter(None, (", ".join(fields[:-1]), fields[-1])))
            parts.append(f"{described(p.layer for p in places)} {both}")
            blocks = sorted({p.block for p in places})
            parts.append(f"block{'s' if len(blocks) > 1 else ''} {_listed(blocks, 6, 'blocks')}")
        scenarios = dict.fromkeys(f.scenario for f in self.more)
        if not places or scenarios.keys() != {self.first.scenario}:
            parts.append(f"in {_listed(scenarios, 3, 'scenarios')}")
        return printable(f"and {len(self.more):,} more like it: {', '.join(parts)}")


def alike(findings: Iterable[Finding]) -> list[Alike]:
    """The findings, each once: the first of every (oracle, kind) first, and among those the ones with an owner."""
    together: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        together.setdefault(_sort(finding), []).append(finding)
    groups = sorted((Alike(same[0], tuple(same[1:])) for same in together.values()), key=lambda g: _rank(g.first))
    leaders: dict[tuple[str, str], Alike] = {}
    for group in groups:
        leaders.setdefault((group.first.oracle, group.first.kind), group)
    return [*leaders.values(), *(g for g in groups if g is not leaders[g.first.oracle, g.first.kind])]


def leading(findings: Sequence[Finding]) -> Finding:
    """The finding to start with; there must be one."""
    return min(findings, key=_rank)


def _rank(finding: Finding) -> int:
    """0 for what is told first. Provenance names the owner of what other oracles say more about."""
    if finding.origin is not None:
        return 1 if finding.oracle == "provenance" else 0
    return 3 if finding.oracle == "equality" else 2


def _sort(finding: Finding) -> tuple[str, ...]:
    """What two findings must share to be alike: the sentence but for its numbers, and how far away the owner lives."""
    sentence = re.sub(r"\[[#, ]*\]", "[#]", re.sub(r"\d[\d,]*", "#", finding.message))
    return finding.oracle, finding.kind, sentence, _distance(finding), finding.next_step, str(finding.location is None)


def _distance(finding: Finding) -> str:
    place, owner = finding.location, finding.origin
    if place is None or owner is None:
        return ""
    if owner.layer != place.layer:
        return "another layer"
    return "the same field" if owner.resource == place.resource else "another field"


def _listed(items: Iterable[object], most: int, noun: str) -> str:
    """``3, 7, 9``; of more than ``most``, the first ones and how many there are."""
    words = [str(item) for item in items]
    if len(words) <= most:
        return ", ".join(words)
    return f"{', '.join(words[:most])}, … ({len(words):,} {noun})"
