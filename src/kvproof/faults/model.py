"""What a planted fault is, and what became of it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from kvproof.faults.pages import ByteArray, Pages, Place
from kvproof.faults.transfer import LOAD, Move, Transfer
from kvproof.findings.model import Finding

DENSE = "tiny-qwen3"
HYBRID = "tiny-qwen3-next"
WINDOWED = "tiny-gemma3"
Lookup = Callable[[Any, int], tuple[int | None, bool]]


class Ground(Protocol):
    """What a fault may ask about the engine it is planted in. Everything comes from vLLM or from observed transfers."""

    pages: Pages
    unit: int
    """Tokens per hit unit."""

    def copy(self, direction: str, moves: Iterable[Move]) -> None:
        """Execute moves through the production copier, in front of the recorder of claims."""

    def elsewhere(self) -> AbstractContextManager[None]:
        """Around a write that is no part of any transfer."""

    def stored(self, label: str, move: Move) -> int | None:
        """Address of the true bytes saved for the page of ``move`` by the request with ``label``."""

    def table(self, request: str, group: int) -> list[int]:
        """Block table of a request."""

    def free_block(self) -> int:
        """A block nobody owns."""

    def running(self) -> list[str]:
        """Requests that own blocks now."""


class Fault:
    """Base of all faults: a working connector with one thing wrong. A fresh instance per run.

    Subclasses override the one method that says what is wrong:

    * :meth:`route` changes where the bytes of a transfer go or come from,
    * :meth:`alter` changes the bytes that arrived,
    * :meth:`carry` and the three moments below change when a transfer happens,
    * :meth:`look_up` changes what the scheduler is told.
    """

    stands_for: ClassVar[tuple[str, ...]] = ()
    """Ids of public-bugs.md."""
    oracle: ClassVar[str] = "placement"
    """The oracle that must report the exact place."""
    stray: ClassVar[bool] = False
    """The place is the first wrong byte outside the pages the transfer was meant for."""
    on: ClassVar[tuple[str, ...]] = (LOAD,)
    story: ClassVar[str] = "repeat"
    model: ClassVar[str] = DENSE
    may_stop: ClassVar[bool] = False
    """vLLM or the connector may refuse to go on; then the lifecycle oracle must say so. Run after everything else."""
    unfit: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """See :func:`unfit`."""

    def __init__(self) -> None:
        self.request: str | None = None
        """The request a lookup was wrong for."""

    @classmethod
    def name(cls) -> str:
        """The class name in kebab case."""
        return re.sub(r"(?<=[a-z])(?=[A-Z0-9])", "-", cls.__name__).lower()

    @classmethod
    def summary(cls) -> str:
        """The docstring as one paragraph."""
        return " ".join((inspect.getdoc(cls) or "").split())

    def carry(self, transfer: Transfer, ground: Ground) -> None:
        """Execute a transfer, wrong."""
        if transfer.direction not in self.on:
            ground.copy(transfer.direction, transfer.moves)
            return
        ground.copy(transfer.direction, self.route(transfer, ground))
        for move in transfer.moves:
            self.alter(move, transfer, ground)

    def route(self, transfer: Transfer, ground: Ground) -> Iterable[Move]:
        """The moves to execute instead of ``transfer.moves``."""
        del ground
        return transfer.moves

    def alter(self, move: Move, transfer: Transfer, ground: Ground) -> None:
        """Change bytes after a move was executed."""

    def before_forward(self, ground: Ground) -> None:
        """Nothing of this step is computed yet."""

    def after_read(self, layer: str, ground: Ground) -> None:
        """A layer has read its cache."""

    def report(self, loaded: set[str]) -> set[str]:
        """Of the requests whose loads are finished, those the scheduler is told about."""
        return loaded

    def look_up(self, production: Lookup, request: Any, label: str, computed: int, ground: Ground) -> Any:
        """The connector's answer to the scheduler: (external tokens, asynchronous)."""
        del label, ground
        return production(request, computed)


ONE_GROUP = "vLLM gives all layers one block table for it, without windows"


def unfit(**reasons: str) -> dict[str, str]:
    """Connector -> why the fault cannot be planted there."""
    return reasons


def middle_layer(pages: Pages) -> str:
    """The layer that single-layer faults pick: neither the first nor, where there are three, the last."""
    layers = pages.layers
    return layers[min(1, len(layers) - 1)]


def target_page(move: Move, load: bool) -> ByteArray:
    """The bytes a move has just written."""
    from kvproof.faults.pages import bytes_at

    return bytes_at(move.kv if load else move.store, move.nbytes)


@dataclass(frozen=True)
class Expected:
    """Where the fault did its damage: a byte, or a request or scenario where no byte is wrong."""

    place: Place | None = None
    request: str | None = None
    scenario: str | None = None

    @property
    def is_padding(self) -> bool:
        """Whether the byte belongs to no resource of the block's owner."""
        return self.place is not None and self.place.resource == "padding"

    def to_json(self) -> dict[str, Any]:
        if self.place is not None:
            return dict(vars(self.place))
        return {"request": self.request} if self.request is not None else {"scenario": self.scenario}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Expected:
        return Expected(**data) if "request" in data or "scenario" in data else Expected(Place(**data))

    def __str__(self) -> str:
        if self.place is not None:
            return str(self.place)
        return f"request {self.request}" if self.request is not None else f"scenario {self.scenario}"


def catch(oracle: str, expected: Expected, findings: list[Finding]) -> Finding | None:
    """The finding of ``oracle`` whose location is exactly ``expected``."""
    for finding in findings:
        if finding.oracle != oracle:
            continue
        if expected.place is not None:
            hit = expected.place.is_at(finding.location)
        elif expected.request is not None:
            hit = finding.message.startswith(f"{expected.request}: ")
        else:
            hit = finding.scenario == expected.scenario
        if hit:
            return finding
    return None


@dataclass(frozen=True)
class Outcome:
    """What became of one fault. ``expected`` was computed by comparing bytes, ``location`` is what the oracle said."""

    name: str
    caught: bool
    oracle: str
    location: dict[str, Any] | None
    public_kind: tuple[str, ...]
    expected: dict[str, Any] | None = None
    applicable: bool = True
    reason: str = ""
    oracles: dict[str, int] = field(default_factory=dict)  # oracle -> findings
    wrong_pages: int = 0  # pages with a wrong byte after the first transfer that went wrong
    located_pages: int = 0  # of these, those whose first wrong byte some finding names exactly
    message: str = ""
    seconds: float = 0.0
    model: str = DENSE

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self)) | {"public_kind": list(self.public_kind)}


@dataclass(frozen=True)
class Control:
    """The same stories without a fault. ``oracles`` maps to their status."""

    model: str
    when: str
    clean: bool
    oracles: dict[str, str]
    findings: list[str]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))
