"""Runs the rules over a record: which are enabled, which cannot be judged, which yield to a more specific one. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from kvproof.trace.rules.catalogue import RULES, Rule
from kvproof.trace.rules.model import LIMIT, Violation

Report = Callable[[str, BaseException], None]


class Judge:
    """Judges records with the enabled rules.

    ``judged`` counts records per type; ``skipped`` counts per rule how often a record lacked a native field.
    A rule that raises is counted in ``failed`` and reported; it never reaches the engine.
    """

    def __init__(self, enabled: Iterable[str], report: Report):
        wanted = set(enabled)
        self._rules: dict[type, list[Rule]] = {}
        for rule in RULES.values():
            if rule.name in wanted:
                self._rules.setdefault(rule.record, []).append(rule)
        self._report = report
        self.judged: Counter[str] = Counter()
        self.fast: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.violations: Counter[str] = Counter()

    def leave_out(self, names: Iterable[str]) -> None:
        """Rules that can never be judged here and are named as such; they are not counted as skipped."""
        out = set(names)
        self._rules = {kind: [r for r in rules if r.name not in out] for kind, rules in self._rules.items()}

    def judge(self, record: Any) -> list[Violation]:
        """All findings of all enabled rules for this record, the specific ones first."""
        kind = type(record)
        self.judged[kind.__name__] += 1
        found: list[Violation] = []
        named: set[tuple[str, str | None, int | None]] = set()
        for rule in self._rules.get(kind, ()):
            if any(getattr(record, need) is None for need in rule.needs):
                self.skipped[rule.name] += 1
                continue
            try:
                results = list(islice(rule.check(record), LIMIT))
            except Exception as error:  # the guard must survive what it is there to report
                self.failed[rule.name] += 1
                self._report(f"rule {rule.name}", error)
                continue
            for violation in results:
                if any((other, violation.request, violation.group) in named for other in rule.yields_to):
                    continue
                named.add((rule.name, violation.request, violation.group))
                found.append(violation)
                self.violations[rule.name] += 1
        return found

    def pass_fast(self, record: Any) -> None:
        """Count a record whose fast check implies that no rule can fire."""
        self.fast[type(record).__name__] += 1

    def counters(self) -> dict[str, dict[str, int]]:
        """All counts, for the log."""
        return {
            "judged": dict(self.judged),
            "fast": dict(self.fast),
            "skipped": dict(self.skipped),
            "failed": dict(self.failed),
            "violations": dict(self.violations),
        }
