"""What a fault in a running engine is, and what became of it."""

from __future__ import annotations

import inspect
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from kvproof.faults.trace.plan import NativePlan
    from kvproof.faults.trace.stage import Stage
    from kvproof.faults.trace.tap import Call

V2, DRAFTS, OFFLOAD, V1, CONTENT = "v2", "v2-drafts", "v2-offload", "v1", "v1-content"
"""Engines; what they are is in ``stage.ENGINES``."""


@dataclass(frozen=True)
class Place:
    """Where a fault is, in the guard's terms: manager block ids, slots, token positions. None: it has no such place."""

    request: str | None = None
    group: int | None = None
    block: int | None = None
    slot: int | None = None
    position: int | None = None

    @staticmethod
    def of(event: dict[str, Any]) -> Place:
        """The place a kv.violation names."""
        return Place(*(event.get(key) for key in ("request", "group", "block", "slot", "position")))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in asdict(self).items() if value is not None) or "whole step"


class TraceFault:
    """Base of all faults: one wrong thing in one step of a working engine. A fresh instance per run.

    Subclasses override the moment at which they act. A moment comes again and again until the fault has set
    ``expected``, so a fault waits for the step it needs by doing nothing. ``expected`` is worked out from vLLM's own
    objects alone.
    """

    rule: ClassVar[str]
    """The rule that must fire."""
    engines: ClassVar[tuple[str, ...]] = (V2,)
    story: ClassVar[str] = "pair"
    follows: ClassVar[tuple[str, ...]] = ()
    """Moments at which the fault goes on after it was planted."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.expected: Place | None = None
        """Where the fault is; None until it is planted."""

    @classmethod
    def base_name(cls) -> str:
        """The class name in kebab case."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", cls.__name__).lower()

    @classmethod
    def summary(cls) -> str:
        """The docstring as one paragraph."""
        return " ".join((inspect.getdoc(cls) or "").split())

    def scheduled(self, call: Call) -> None:
        """``call.result`` is the SchedulerOutput; what is changed stays until the runner works on it."""

    def handed_over(self, call: Call) -> None:
        """``call.args[0]`` is the SchedulerOutput on its way into the model runner."""

    def planned(self, plan: NativePlan) -> None:
        """The runner has made its plan of writes and reads."""

    def dummy_planned(self, call: Call) -> None:
        """The runner has made the plan of a dummy run."""

    def sampled(self, call: Call) -> None:
        """``call.args`` are idx_mapping, sampled, num_sampled, num_rejected, query_start_loc."""

    def reported(self, call: Call) -> None:
        """``call.args`` are the SchedulerOutput and the ModelRunnerOutput on their way into the scheduler."""

    def updated(self, call: Call) -> None:
        """The scheduler has taken the result in; arguments as in ``reported``."""

    def allocated(self, call: Call) -> None:
        """``call.result`` are the blocks the pool hands out."""

    def released(self, call: Call) -> None:
        """``call.args[0]`` is the list of blocks that were given back."""

    def matched(self, call: Call) -> None:
        """The connector has answered how many tokens it has for ``call.args[0]``."""

    def load_targeted(self, call: Call) -> None:
        """``call.args`` are the request, the blocks to load into, and the tokens to load."""


@dataclass(frozen=True)
class Planted:
    """An entry of the catalogue: a fault in one engine."""

    name: str
    fault: type[TraceFault]
    engine: str

    @property
    def runner(self) -> str:
        """v1 | v2."""
        return self.engine[:2]


@dataclass(frozen=True)
class Outcome:
    """What became of one fault. ``expected_location`` is the fault's own, ``location`` the guard's.

    ``also`` are other rules that fired before the request was gone: one damage is often visible from several sides.
    """

    name: str
    rule: str
    runner: str
    engine: str
    caught: bool
    location: dict[str, Any] | None = None
    expected_location: dict[str, Any] | None = None
    also: list[str] = field(default_factory=list)
    reason: str = ""
    message: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Control:
    """The same stories in the same engine without a fault. ``findings`` are the guard's messages: none, if clean."""

    engine: str
    runner: str
    when: str
    clean: bool
    steps: int
    findings: list[str]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
