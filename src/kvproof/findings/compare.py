"""Do two evidence directories agree? Criterion by criterion, with the first difference and what agreement proves.

A criterion is ``equal``, ``different`` or ``missing`` (in one directory or in both). What is volatile by nature is
left out before comparing: seconds, process ids, pointers, temporary directories.

The two may come from different platforms (a stand-in and a real card). Then what names the platform cannot agree and
does not decide; every criterion says whether it could see the platform at all. Two proofs of ``kvproof faults --json``
are compared as well: is every fault caught by the same oracle at the same place?
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kvproof.findings import evidence
from kvproof.findings.derived import Derived, derived
from kvproof.findings.logs import normalise_log
from kvproof.findings.model import Verdict
from kvproof.layout import Layout

EQUAL, DIFFERENT, MISSING = "equal", "different", "missing"

VOLATILE_KEYS = frozenset({"schema", "seconds", "time", "timestamp", "pid", "pointer"})
"""JSON keys that say where and when, not what; never compared."""

REQUIRED = ("case", "verdict", "fault localisation")
"""Criteria without which two sides cannot be said to agree, where they are compared at all."""

PLATFORM_FIELDS = ("platform", "cuda_capability", "soc", "declare_soc", "varied")
"""Fields of the case that say where it ran. On one platform they are asked like the rest: its hardware is declared."""

FAULTS_SCHEMA = "kvproof.faults/1"

_LONGEST = 160  # characters of one value in a difference

DOES_NOT_PROVE = (
    "Agreement says that two runs saw and concluded the same. It does not say that the conclusion is right, that a "
    "case neither run covered would agree, or that the same holds on another platform, model or vLLM version."
)


@dataclass(frozen=True)
class Criterion:
    """One thing compared.

    ``result`` is equal, different or missing, ``difference`` the first one as ``path: A's value | B's value``,
    ``missing_in`` the sides (A, B) that lack it. ``sees_platform`` says in words whether two platforms could differ
    without it noticing: it begins with yes, partly or no. ``decides`` is false where the two ran on different platforms
    or, of the log, were asked different cases, and this criterion can only differ.
    """

    name: str
    result: str
    difference: str
    missing_in: tuple[str, ...]
    proves: str
    does_not_prove: str
    sees_platform: str
    decides: bool = True


@dataclass(frozen=True)
class Comparison:
    """Two evidence directories side by side."""

    a: str
    b: str
    criteria: tuple[Criterion, ...]

    @property
    def agree(self) -> bool:
        """No criterion that decides differs or is missing on one side, and those required are there."""
        return not any(
            c.decides and (c.result == DIFFERENT or len(c.missing_in) == 1 or (c.name in REQUIRED and c.missing_in))
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
            raise ValueError(
                f"{path}: is not a kvproof evidence directory (no {evidence.CASE} of ours), nor faults as JSON"
            )
        self._path = path
        self.case = self._json(evidence.CASE)
        self.layout = self._json(evidence.LAYOUT)
        self.report = self._json(evidence.REPORT)
        self._elsewhere = False
        self._own_words: list[tuple[str, str]] = []

    def meet(self, other: _Side) -> None:
        """Learn what beside the runs must differ: the platform, and the words of the case that logs repeat."""
        self._elsewhere = (self.case or {}).get("platform") != (other.case or {}).get("platform")
        # What names the platform stays: that a log sees it is what the log is compared for.
        mine, theirs = ({k: v for k, v in (s.case or {}).items() if k not in PLATFORM_FIELDS} for s in (self, other))
        words = {word: key for key, *pair in _different_words(mine, theirs) for word in pair}
        # The longest first: the name of one connector may begin like another's.
        self._own_words = sorted(words.items(), key=lambda item: -len(item[0]))

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

    def asked(self) -> dict[str, Any] | None:
        """The case; without what names the platform where the other side ran on another one."""
        left_out = PLATFORM_FIELDS if self._elsewhere else ()
        return None if self.case is None else {k: v for k, v in self.case.items() if k not in left_out}

    def platform(self) -> dict[str, Any] | None:
        """The platform the case declares."""
        return None if self.case is None else {key: self.case.get(key) for key in PLATFORM_FIELDS}

    def outcome(self) -> dict[str, Any] | None:
        """The verdict, and why where it is no PASS. How many bytes that were is counted by oracles and findings."""
        ended = self.of_report("verdict", "exit_code", "reason")
        if ended is None:
            return None
        reason = _BYTES.sub("<bytes>", str(ended.pop("reason") or ""))
        return ended if ended["verdict"] == Verdict.PASS.value else ended | {"reason": reason}

    def plan(self) -> dict[str, Any] | None:
        """vLLM's KVCacheConfig; reports of older versions have none."""
        return None if self.report is None else self.report.get("kv_cache_config") or None

    def derived(self) -> dict[str, str] | None:
        """Counters that follow from layers × blocks, in words; None for a run that did not end well or cannot say."""
        records = self.transcript()
        if self.report is None or not self.layout or records is None:
            return None
        groups = self.report.get("groups") or []
        ended_well = self.report.get("verdict") in (Verdict.PASS.value, Verdict.PARTIAL.value)
        if not ended_well or not groups or any("computed_bytes" not in group for group in groups):
            return None
        layout = Layout.from_json({key: value for key, value in self.layout.items() if key != "schema"})
        try:
            return {counter.name: _in_words(counter) for counter in derived(layout, groups, records)} or None
        except (KeyError, IndexError, TypeError) as error:
            where = self._path / evidence.TRANSCRIPT
            raise ValueError(f"{where}: does not fit the layout beside it ({error!r})") from error

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
        """How often each line stands in the normalised log: the lines of two processes interleave as they like.

        Where the two cases differ in a word (a connector's name), it reads as the field's name on both sides.
        """
        text = self._text(evidence.LOG)
        text = self._text(evidence.NORMALISED_LOG) if text is None else normalise_log(text)
        if text is None:
            return None
        for word, key in self._own_words:
            text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", f"<{key}>", text)
        return Counter(text.splitlines())

    def layout_parts(self, *keys: str) -> dict[str, Any] | None:
        """Top-level parts of the layout."""
        return None if self.layout is None else {key: self.layout.get(key) for key in keys}

    def resources(self, *keys: str) -> dict[str, Any] | None:
        """The named fields of every resource."""
        if self.layout is None:
            return None
        return {"resources": [{key: r.get(key) for key in keys} for r in self.layout.get("resources", [])]}


_BYTES = re.compile(r"\b\d[\d,]* bytes?\b(?! \d)")
"""A number of bytes; ``block 41 byte 6`` is a place."""


def _different_words(a: Any, b: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """(field, A's word, B's word) of two cases, volatile ones aside. Numbers and single letters stand for too much."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in a.keys() & b.keys():
            yield from _different_words(a[name], b[name], name)
    elif isinstance(a, str) and isinstance(b, str) and min(len(a), len(b)) > 1 and _stable(a) != _stable(b):
        yield key, a, b


WRONG = "counted"
"""How a derived counter begins that the run did not count as it follows."""


def _in_words(counter: Derived) -> str:
    return f"{counter.derived:,}" if counter.holds else f"{WRONG} {counter.counted:,}, derived {counter.derived:,}"


def _miscounted(counters: dict[str, str]) -> str:
    """The first counter that does not follow from layout and block tables."""
    return next((f"{name}: {words}" for name, words in counters.items() if words.startswith(WRONG)), "")


@dataclass(frozen=True)
class _Rule:
    """How a criterion is read from a side; None where the side lacks it.

    ``across`` is false where it cannot agree across platforms, ``other_case`` where it cannot if other questions were
    asked. ``fault`` says what is wrong with one side by itself, ``nothing`` what it proves and does not prove that both
    sides are empty.
    """

    name: str
    read: Callable[[Any], Any]
    proves: str
    does_not_prove: str
    sees_platform: str
    across: bool = True
    other_case: bool = True
    nothing: tuple[str, str] | None = None
    fault: Callable[[Any], str] = lambda value: ""


_RULES = (
    _Rule(
        "case",
        _Side.asked,
        "both runs were asked the same question (on one platform, also of the same declared hardware)",
        "that the machines, drivers or builds were the same",
        "no: the platform is a criterion of its own",
    ),
    _Rule(
        "platform",
        _Side.platform,
        "both runs declared the same platform, capability and SoC",
        "that the hardware is what was declared",
        "yes: it names it",
        across=False,
    ),
    _Rule(
        "versions",
        lambda side: side.of_report("versions"),
        "both runs used the same releases",
        "that the releases were built alike",
        "no: one build serves many devices",
        across=False,
    ),
    _Rule(
        "kv cache config",
        _Side.plan,
        "vLLM planned the same groups, specs, tensor sizes and strides",
        "that a tensor lies where the plan says: only what is read off the tensors shows that",
        "no: it is the plan, and two platforms with one plan can place their tensors differently",
    ),
    _Rule(
        "layout groups",
        lambda side: side.layout_parts("kv_layout", "groups"),
        "vLLM formed the same KV-cache groups with the same block sizes and windows",
        "where their bytes lie",
        "partly: the backend a platform chooses can ask for other blocks; where tensors lie is not in it",
    ),
    _Rule(
        "layout resources",
        lambda side: side.resources("id", "group", "layer", "dtype", "tokens_per_row", "fields"),
        "every layer holds the same tensors with the same fields",
        "where their bytes lie",
        "partly: element types and fields are read off the tensors; addresses are not in it",
    ),
    _Rule(
        "layout strides",
        lambda side: side.resources("storage", "offset", "block_stride", "row_axes", "cell_axes"),
        "every byte of content has the same address within its storage",
        "that a connector uses these addresses",
        "yes: storages, offsets and strides are read off the tensors the platform's own runner made",
    ),
    _Rule(
        "layout padding",
        lambda side: side.resources("page_bytes"),
        "pages have the same size, padding included",
        "what stands in the padding",
        "yes: a platform that aligns pages has others",
    ),
    _Rule(
        "layout size",
        lambda side: side.layout_parts("num_blocks", "storages"),
        "the caches have the same number of blocks and bytes",
        "that a production cache, sized by free memory, behaves alike",
        "yes: storages are the allocations themselves",
    ),
    _Rule(
        "verdict",
        _Side.outcome,
        "both runs ended alike; where that is no PASS, for the same reason, counted bytes aside",
        "that the verdict is right; VERIFICATION.md says what it asserts",
        "no: both can pass in layouts that have nothing in common",
    ),
    _Rule(
        "oracles",
        lambda side: side.of_report("oracles"),
        "every oracle judged as many bytes, blocks, resources and items and came to the same result",
        "that they were the same bytes",
        "partly: as many bytes are judged as the pages have",
    ),
    _Rule(
        "groups",
        lambda side: side.of_report("groups"),
        "the same bytes had to be restored, and as many were",
        "that the declared policy is the one the model needs",
        "partly: it counts bytes of rows, wherever they lie",
    ),
    _Rule(
        "scenarios",
        lambda side: side.of_report("scenarios"),
        "the same scenarios ran, with the same tokens and hits",
        "that each step took the same time or order inside vLLM",
        "no: tokens and hits are the scheduler's, which never sees an address",
    ),
    _Rule(
        "findings",
        _Side.findings,
        "both runs found the same faults at the same bytes",
        "that there are no others",
        "yes: a finding names the byte, and where it lies is the platform's",
        nothing=("neither run found a fault", "that there is none"),
    ),
    _Rule(
        "substitutions",
        lambda side: side.of_report("substitutions"),
        "both runs stood in for the same missing parts",
        "that a device behaves like its stand-in",
        "yes: it lists what the platform lacks",
        across=False,
    ),
    _Rule(
        "counters",
        lambda side: side.of_report("counters"),
        "as many bytes and calls were counted",
        "that they came in the same order",
        "partly: bytes of pages and copies are counted, not their addresses",
    ),
    _Rule(
        "derived counters",
        _Side.derived,
        "on both sides the bytes computed and restored, group by group, are what layers × blocks say: rows complete "
        "in the block tables × bytes of a row × layers (states aside)",
        "which bytes they were",
        "no: each side is worked out from its own layout",
        fault=_miscounted,
    ),
    _Rule(
        "transcript",
        _Side.transcript,
        "vLLM scheduled, allocated and computed the same, step by step",
        "that timing, threads or device streams were ordered alike",
        "no: block tables and token counts hold no address",
    ),
    _Rule(
        "log",
        _Side.log,
        "vLLM and kvproof logged the same lines, times, process ids and the words in which the cases differ aside, in "
        "whatever order",
        "anything about what is not logged",
        "yes: vLLM names device and backend in it",
        across=False,
        other_case=False,
    ),
)


class _Proof:
    """The JSON of ``kvproof faults --json``, in a file or in a directory's faults.json."""

    def __init__(self, path: Path) -> None:
        file = _faults_file(path)
        self.data = _parse(file.read_text(encoding="utf-8"), str(file))
        if not isinstance(self.data, dict) or self.data.get("schema") != FAULTS_SCHEMA:
            raise ValueError(
                f"{file}: is not the JSON of `kvproof faults --json` (schema {FAULTS_SCHEMA}); "
                "name a run's evidence by its directory"
            )

    def localisation(self) -> dict[str, Any]:
        """Fault -> whether it was caught, by which oracle, and where."""
        keys = ("applicable", "caught", "oracle", "location", "expected")
        return {fault["name"]: {key: fault.get(key) for key in keys} for fault in self.data.get("faults", [])}


_FAULT_RULES = (
    _Rule(
        "fault localisation",
        _Proof.localisation,
        "every planted fault was caught by the same oracle at the same group, layer, resource, block and byte",
        "that the same bytes of the storage were damaged",
        "partly: a place is named by its byte in the page, so pages laid out differently show, storages do not",
    ),
    _Rule(
        "fault controls",
        lambda proof: proof.data.get("control"),
        "the runs without a fault ended alike",
        "that they saw the same bytes",
        "no: a clean run names no byte",
    ),
)


def _faults_file(path: Path) -> Path:
    return path / evidence.FAULTS if path.is_dir() else path


def compare(a: Path, b: Path) -> Comparison:
    """Compare two evidence directories, or two proofs of ``kvproof faults --json``.

    Raises ValueError, one line naming the path, if one is neither or a file in it is broken.
    """
    for path in (a, b):
        if _is_layout(path):
            both = shlex.join((str(a), str(b)))
            raise ValueError(f"{path}: is a layout; what moved between two is said by `kvproof layout --diff {both}`")
    if all(_faults_file(path).is_file() and not evidence.is_evidence(path) for path in (a, b)):
        proofs = _Proof(a), _Proof(b)
        return Comparison(str(a), str(b), tuple(_judge(rule, *proofs) for rule in _FAULT_RULES))
    sides = _Side(a), _Side(b)
    for side, other in (sides, sides[::-1]):
        side.meet(other)
    across = len({(side.case or {}).get("platform") for side in sides}) > 1
    other_case = bool(first_difference(*(_stable(side.asked()) for side in sides)))
    return Comparison(str(a), str(b), tuple(_judge(rule, *sides, across, other_case) for rule in _RULES))


def _is_layout(path: Path) -> bool:
    """True for a file of `kvproof layout --json` or a layout.json by itself."""
    if not path.is_file():
        return False
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.keys() >= {"kv_layout", "storages", "groups", "resources"}


def _judge(rule: _Rule, a: Any, b: Any, across: bool = False, other_case: bool = False) -> Criterion:
    """``across``: the two ran on different platforms; ``other_case``: they were asked different questions."""
    values = {"A": rule.read(a), "B": rule.read(b)}
    missing_in = tuple(side for side, value in values.items() if value is None)
    difference = "" if missing_in else first_difference(*map(_stable, values.values()))
    faults = [f"{side}: {fault}" for side, value in values.items() if not missing_in and (fault := rule.fault(value))]
    result = MISSING if missing_in else DIFFERENT if difference or faults else EQUAL
    decides = (rule.across or not across) and (rule.other_case or not other_case)
    proofs = rule.nothing if rule.nothing and not any(values.values()) else (rule.proves, rule.does_not_prove)
    return Criterion(
        rule.name, result, faults[0] if faults else difference, missing_in, *proofs, rule.sees_platform, decides
    )  # fmt: skip


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
