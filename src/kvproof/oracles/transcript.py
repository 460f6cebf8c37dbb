"""What a run saw, in vLLM's own terms. Oracles read this and nothing else.

What vLLM says (block tables, computed and external tokens) and what the connector says about itself (claims) are kept
in different records: a claim is checked, never believed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvproof.bytecode.ledger import Judged, Mismatch

LOADED, OPTIONAL, CACHED, COMPUTED = "loaded", "optional", "cached", "computed"
NULL, PADDING, FREE, FOREIGN_BLOCK = "null", "padding", "free", "other"


@dataclass(frozen=True)
class Load:
    """One admission of a request, all counts in tokens.

    ``local`` and ``external`` are vLLM's hit lengths; ``claimed`` is what the connector answered to the lookup.
    ``stored`` is the longest prefix of this prompt that was computed before in this run; ``expected`` the hit
    the connector's declared rule gives for it (None: no rule declared).
    """

    scenario: str
    request: str
    prompt: int
    local: int
    external: int
    claimed: int | None
    asynchronous: bool
    stored: int
    expected: int | None


@dataclass(frozen=True)
class Observation:
    """A mismatch between memory and ledger, and where it was seen.

    ``moment``: ``after_load`` (synchronous loads of this step were started, nothing computed yet), ``read`` (a layer is
    about to read its cache), ``at_rest`` (the engine is idle, or a block is about to be handed out again). ``region``
    says what the place is to ``request``.
    """

    scenario: str
    step: int
    moment: str
    request: str | None
    region: str
    mismatch: Mismatch
    token: int | None = None  # position in the request that the first wrong row stands for


@dataclass(frozen=True)
class DigestCheck:
    """A restored block compared with what stood in the source block, both read through the runner's own views."""

    scenario: str
    request: str
    group: int
    layer: str
    block: int
    nbytes: int
    equal: bool


@dataclass(frozen=True)
class Claim:
    """Addresses a connector used on KV memory in one call, resolved to blocks.

    ``allowed`` are the blocks vLLM's tables permit at that moment; ``outside`` counts addresses that lie in no page
    (not executed), ``crossing`` those whose range leaves their page. ``starts`` is the first address used of each
    block, as (storage, byte), where the connector's own addresses could be seen.
    """

    scenario: str
    step: int
    direction: str  # load | save
    via: str  # copy | torch
    addresses: int
    nbytes: int
    blocks: tuple[int, ...]
    allowed: tuple[int, ...]
    outside: int = 0
    crossing: int = 0
    first_illegal: str = ""
    starts: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Named:
    """Names the oracles need to speak: who produced a content, and which block held it."""

    request: str
    token: int
    blocks: dict[int, int]  # group -> block that held this token when it was computed


@dataclass
class Transcript:
    """Everything the oracles judge."""

    loads: list[Load] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    digests: list[DigestCheck] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    judged: dict[str, Judged] = field(default_factory=dict)  # moment -> amount
    restored_bytes: dict[int, int] = field(default_factory=dict)  # resource -> bytes found restored
    saved_bytes: dict[int, int] = field(default_factory=dict)  # resource -> bytes computed by the model
    uncomputed_bytes: int = 0  # bytes not computed yet in blocks a save could read
    origins_checked: int = 0  # restored rows whose bytes were decoded back to their own name
    origins_wrong: int = 0
    names: dict[int, Named] = field(default_factory=dict)  # content -> who
    errors: list[tuple[str, str]] = field(default_factory=list)  # (scenario, exception raised by the connector)
    records: list[dict[str, Any]] = field(default_factory=list)  # lines of transcript.jsonl

    def judge(self, moment: str, amount: Judged) -> None:
        self.judged.setdefault(moment, Judged()).add(amount)
