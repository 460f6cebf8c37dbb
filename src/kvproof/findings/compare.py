"""Do two evidence directories agree? Criterion by criterion, with the first difference and what agreement proves.

A criterion is ``equal``, ``different`` or ``missing`` (in one directory or in both). What is volatile by nature is
left out before comparing: seconds, process ids, pointers, temporary directories.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kvproof.findings import evidence
from kvproof.findings.logs import normalise_log

EQUAL, DIFFERENT, MISSING = "equal", "different", "missing"

VOLATILE_KEYS = frozenset({"schema", "seconds", "time", "timestamp", "pid", "pointer"})
"""JSON keys that say where and when, not what; never compared."""

REQUIRED = ("case", "verdict")
"""Criteria without which two directories cannot be said to agree."""

_LONGEST = 160  # characters of one value in a difference

DOES_NOT_PROVE = (
    "Agreement says that two runs saw and concluded the same. It does not say that the conclusion is right, that a "
    "case neither run covered would agree, or that the same holds on another platform, model or vLLM version."
)


@dataclass(frozen=True)
class Criterion:
    """One thing compared.

    ``result`` is equal, different or missing, ``difference`` the first one as ``path: A's value | B's value``,
    ``missing_in`` the sides (A, B) that lack it.
    """

    name: str
    result: str
    difference: str
    missing_in: tuple[str, ...]
    proves: str
    does_not_prove: str


@dataclass(frozen=True)
class Comparison:
    """Two evidence directories side by side."""

    a: str
    b: str
    criteria: tuple[Criterion, ...]

    @property
    def agree(self) -> bool:
        """No criterion differs or is missing on one side, and those required are there."""
        return not any(
            c.result == DIFFERENT or len(c.missing_in) == 1 or (c.name in REQUIRED and c.missing_in)
            for c in self.criteria
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "kvproof.compare/1",
            "a": self.a,
            "b": self.b,
            "agree": self.agree,
            "criteria": [asdict(criterion) for criterion in self.criteria],
            "does_not_prove": DOES_NOT_PROVE,
        }


class _Side:
    """One evidence directory, its files read once. Raises ValueError, one line, for what cannot be read."""

    def __init__(self, path: Path) -> None:
        if not evidence.is_evidence(path):
            raise ValueError(f"{path}: is not a kvproof evidence directory (no {evidence.CASE} of ours)")
        self._path = path
        self.case = self._json(evidence.CASE)
        self.layout = self._json(evidence.LAYOUT)
        self.report = self._json(evidence.REPORT)

    def _text(self, name: str) -> str | None:
        try:
            return (self._path / name).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ValueError(f"{self._path / name}: {error.strerror or error}") from error

    def _json(self, name: str) -> dict[str, Any] | None:
        text = self._text(name)
        if text is None:
            return None
        data = _parse(text, f"{self._path / name}")
        if not isinstance(data, dict):
            raise ValueError(f"{self._path / name}: is not a JSON object")  # noqa: TRY004 - a file's content
        return data

    def of_report(self, *keys: str) -> dict[str, Any] | None:
        """Part of the report, None if there is no report."""
        return None if self.report is None else {key: self.report.get(key) for key in keys}

    def findings(self) -> dict[str, int] | None:
        """How often each finding was made: their order is the order in which scenarios ran."""
        if self.report is None:
            return None
        return Counter(json.dumps(_stable(finding), sort_keys=True) for finding in self.report.get("findings", []))

    def transcript(self) -> list[Any] | None:
        text = self._text(evidence.TRANSCRIPT)
        if text is None:
            return None
        lines = enumerate(text.splitlines(), start=1)
        return [_parse(line, f"{self._path / evidence.TRANSCRIPT} line {number}") for number, line in lines]

    def log(self) -> dict[str, int] | None:
        """How often each line stands in the normalised log: the lines of two processes interleave as they like."""
        text = self._text(evidence.LOG)
        text = self._text(evidence.NORMALISED_LOG) if text is None else normalise_log(text)
        return None if text is None else Counter(text.splitlines())

    def layout_parts(self, *keys: str) -> dict[str, Any] | None:
        """Top-level parts of the layout."""
        return None if self.layout is None else {key: self.layout.get(key) for key in keys}

    def resources(self, *keys: str) -> dict[str, Any] | None:
        """The named fields of every resource."""
        if self.layout is None:
            return None
        return {"resources": [{key: r.get(key) for key in keys} for r in self.layout.get("resources", [])]}


@dataclass(frozen=True)
class _Rule:
    """How a criterion is read from a directory; None where the directory lacks it."""

    name: str
    read: Callable[[_Side], Any]
    proves: str
    does_not_prove: str


_RULES = (
    _Rule(
        "case",
        lambda side: side.case,
        "both runs were asked the same question",
        "that the machines, drivers or builds were the same",
    ),
    _Rule(
        "versions",
        lambda side: side.of_report("versions"),
        "both runs used the same releases",
        "that the releases were built alike",
    ),
    _Rule(
        "layout groups",
        lambda side: side.layout_parts("kv_layout", "groups"),
        "vLLM formed the same KV-cache groups with the same block sizes and windows",
        "where their bytes lie",
    ),
    _Rule(
        "layout resources",
        lambda side: side.resources("id", "group", "layer", "dtype", "tokens_per_row", "fields"),
        "every layer holds the same tensors with the same fields",
        "where their bytes lie",
    ),
    _Rule(
        "layout strides",
        lambda side: side.resources("storage", "offset", "block_stride", "row_axes", "cell_axes"),
        "every byte of content has the same address within its storage",
        "that a connector uses these addresses",
    ),
    _Rule(
        "layout padding",
        lambda side: side.resources("page_bytes"),
        "pages have the same size, padding included",
        "what stands in the padding",
    ),
    _Rule(
        "layout size",
        lambda side: side.layout_parts("num_blocks", "storages"),
        "the caches have the same number of blocks and bytes",
        "that a production cache, sized by free memory, behaves alike",
    ),
    _Rule(
        "verdict",
        lambda side: side.of_report("verdict", "exit_code", "reason"),
        "both runs ended alike",
        "that the verdict is right; VERIFICATION.md says what it asserts",
    ),
    _Rule(
        "oracles",
        lambda side: side.of_report("oracles"),
        "every oracle judged as many bytes, blocks, resources and items and came to the same result",
        "that they were the same bytes",
    ),
    _Rule(
        "groups",
        lambda side: side.of_report("groups"),
        "the same bytes had to be restored, and as many were",
        "that the declared policy is the one the model needs",
    ),
    _Rule(
        "scenarios",
        lambda side: side.of_report("scenarios"),
        "the same scenarios ran, with the same tokens and hits",
        "that each step took the same time or order inside vLLM",
    ),
    _Rule(
        "findings",
        lambda side: side.findings(),
        "both runs found the same faults at the same bytes",
        "that there are no others",
    ),
    _Rule(
        "substitutions",
        lambda side: side.of_report("substitutions"),
        "both runs stood in for the same missing parts",
        "that a device behaves like its stand-in",
    ),
    _Rule(
        "counters",
        lambda side: side.of_report("counters"),
        "as many bytes and calls were counted",
        "that they came in the same order",
    ),
    _Rule(
        "transcript",
        lambda side: side.transcript(),
        "vLLM scheduled, allocated and computed the same, step by step",
        "that timing, threads or device streams were ordered alike",
    ),
    _Rule(
        "log",
        lambda side: side.log(),
        "vLLM and kvproof logged the same lines, times and process ids aside, in whatever order",
        "anything about what is not logged",
    ),
)


def compare(a: Path, b: Path) -> Comparison:
    """Compare two evidence directories.

    Raises ValueError, one line naming the path, if one is not an evidence directory or a file in it is broken.
    """
    sides = _Side(a), _Side(b)
    return Comparison(str(a), str(b), tuple(_judge(rule, *sides) for rule in _RULES))


def _judge(rule: _Rule, a: _Side, b: _Side) -> Criterion:
    values = {"A": rule.read(a), "B": rule.read(b)}
    missing_in = tuple(side for side, value in values.items() if value is None)
    difference = "" if missing_in else first_difference(*map(_stable, values.values()))
    result = MISSING if missing_in else DIFFERENT if difference else EQUAL
    return Criterion(rule.name, result, difference, missing_in, rule.proves, rule.does_not_prove)


_ABSENT = object()


def first_difference(a: Any, b: Any, path: str = "") -> str:
    """The first place where two JSON values differ, as ``path: a | b``; empty if they are equal."""
    if a == b:
        return ""
    pairs: Iterable[tuple[str, Any, Any]]
    if isinstance(a, dict) and isinstance(b, dict):
        dot = "." if path else ""
        pairs = ((f"{path}{dot}{key}", a.get(key, _ABSENT), b.get(key, _ABSENT)) for key in {**a, **b})
    elif isinstance(a, list) and isinstance(b, list):
        pairs = ((f"{path}[{i}]", x, y) for i, (x, y) in enumerate(zip_longest(a, b, fillvalue=_ABSENT)))
    else:
        return f"{path + ': ' if path else ''}{_shown(a)} | {_shown(b)}"
    differences = (first_difference(x, y, place) for place, x, y in pairs)
    return next(filter(None, differences))


def _shown(value: Any) -> str:
    text = "absent" if value is _ABSENT else json.dumps(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _stable(value: Any) -> Any:
    """``value`` without volatile keys and with normalised strings."""
    if isinstance(value, dict):
        return {key: _stable(item) for key, item in value.items() if key not in VOLATILE_KEYS}
    if isinstance(value, list):
        return [_stable(item) for item in value]
    return normalise_log(value) if isinstance(value, str) else value


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: broken JSON ({error})") from error
