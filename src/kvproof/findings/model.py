"""Verdicts, findings and the report: the vocabulary every other package speaks.

Pure data. Each class has ``to_json`` whose field names are a public interface (docs/json.md).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Verdict(Enum):
    """Outcome of a run; the value is what is printed, ``exit_code`` what the process returns."""

    PASS = "PASS"
    PARTIAL = "PARTIALLY VERIFIED"
    FAIL = "FAIL"
    UNSUPPORTED = "UNSUPPORTED"

    @property
    def exit_code(self) -> int:
        return {"PASS": 0, "FAIL": 1, "UNSUPPORTED": 3, "PARTIALLY VERIFIED": 4}[self.value]


USAGE_EXIT_CODE = 2
"""Exit code of a command whose input was refused before anything was written."""


class Status(Enum):
    """What became of one oracle."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    VACUOUS = "vacuous"


@dataclass(frozen=True)
class Location:
    """Where a byte stands. ``byte`` counts from the start of the block's page of this layer."""

    group: int
    layer: str
    resource: str
    block: int
    byte: int
    row: int | None = None
    token: int | None = None
    request: str | None = None
    rank: int = 0

    def __str__(self) -> str:
        return f"group {self.group} {self.layer} {self.resource} block {self.block} byte {self.byte}"


@dataclass(frozen=True)
class Origin:
    """Whose bytes stand at a location, read back from the byte code."""

    layer: str
    resource: str
    request: str
    token: int
    block: int | None
    byte: int

    def __str__(self) -> str:
        block = "a block that is free by now" if self.block is None else f"block {self.block}"
        return f"{self.layer} {self.resource} {block} byte {self.byte} (token {self.token} of {self.request})"


@dataclass(frozen=True)
class Finding:
    """One named fault with its first witness.

    ``kind`` is the anomaly within the oracle (``still_poison``, ``foreign``, ``stray_write`` ...),
    ``bytes_affected`` the number of bytes [B] the same cause touched in this scenario step.
    """

    oracle: str
    kind: str
    message: str
    scenario: str
    location: Location | None = None
    origin: Origin | None = None
    bytes_affected: int = 0
    next_step: str = ""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class OracleResult:
    """What one oracle judged, against which independent source, and the outcome."""

    oracle: str
    status: Status
    source: str
    judged_bytes: int = 0
    judged_blocks: int = 0
    judged_resources: int = 0
    judged_items: int = 0
    findings: int = 0
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"status": self.status.value}


CATEGORIES = {"P": "probing", "E": "execution order", "M": "memory placement", "W": "weights", "K": "kernels"}
"""Letter of a substitution's category -> the word for it."""


@dataclass(frozen=True)
class Substitution:
    """One thing the machine lacks and kvproof stands in for, with the reason why the layout cannot notice."""

    symbol: str
    category: str  # a letter of CATEGORIES
    reason: str
    layout_neutral: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class GroupPolicy:
    """What a KV-cache group must get back after an external hit, as vLLM's own spec says it."""

    group: int
    kind: str
    block_size: int  # tokens
    layers: int
    rule: str  # all | window | state | recomputed
    declared: str  # in words, for the report
    restored_bytes: int = 0
    not_restored_bytes: int = 0
    computed_bytes: int = 0  # written by the model

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class ScenarioSummary:
    """One scenario that ran: what was asked, what was hit, how it ended."""

    name: str
    mode: str
    requests: int
    steps: int
    prompt_tokens: int
    local_hit_tokens: int
    external_hit_tokens: int
    findings: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class PageMap:
    """Byte map of one page: ``runs`` are (start byte, length in bytes, state), in order, without holes.

    State is one of ``restored``, ``computed``, ``poison``, ``foreign``, ``stray``, ``canary``, ``null``.
    """

    resource: int
    block: int
    runs: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True)
class ByteMap:
    """Memory of one request's blocks at the moment it was judged; drawn on the HTML page."""

    scenario: str
    request: str
    groups: dict[int, list[int]]  # group -> block ids in the order of the request's tokens
    pages: list[PageMap]

    def to_json(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "request": self.request,
            "groups": {str(group): blocks for group, blocks in self.groups.items()},
            "pages": [
                {"resource": p.resource, "block": p.block, "runs": [list(r) for r in p.runs]} for p in self.pages
            ],
        }


@dataclass
class Report:
    """Everything a run says. ``layout`` is ``Layout.to_json()``; ``case`` is the frozen case.

    ``kv_cache_config`` is the plan as vLLM states it; the layout is what its tensors show.
    """

    case: dict[str, Any]
    verdict: Verdict
    reason: str
    oracles: list[OracleResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    groups: list[GroupPolicy] = field(default_factory=list)
    scenarios: list[ScenarioSummary] = field(default_factory=list)
    substitutions: list[Substitution] = field(default_factory=list)
    bytemaps: list[ByteMap] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    kv_cache_config: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "kvproof.report/1",
            "verdict": self.verdict.value,
            "exit_code": self.verdict.exit_code,
            "reason": self.reason,
            "case": self.case,
            "versions": self.versions,
            "oracles": [o.to_json() for o in self.oracles],
            "findings": [f.to_json() for f in self.findings],
            "groups": [g.to_json() for g in self.groups],
            "scenarios": [s.to_json() for s in self.scenarios],
            "substitutions": [s.to_json() for s in self.substitutions],
            "counters": self.counters,
            "layout": self.layout,
            "kv_cache_config": self.kv_cache_config,
            "bytemaps": [b.to_json() for b in self.bytemaps],
        }
