"""Where a fault can put its hand: between a native method and the guard that looks at it.

The guard wraps methods of single objects. A tap has two halves around that wrapper: ``below`` in the class, made before
the engine starts, so that the guard takes it for the native method; ``above`` on the object, made afterwards. Whatever
is changed just before the guard looks is taken back right after it has looked, before native code uses it, so no fault
can crash or spoil the engine it is planted in. The guard itself is neither called nor changed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvproof.faults.trace.plan import plan_v1, plan_v2

if TYPE_CHECKING:
    from kvproof.faults.trace.model import TraceFault


class Changes:
    """What a fault has altered in native objects, and how to take it back: the latest first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def attr(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute."""
        self.later(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def item(self, container: Any, key: Any, value: Any) -> None:
        """Set an entry of a list, dictionary or tensor."""
        old = container[key]
        self.later(functools.partial(container.__setitem__, key, old.clone() if hasattr(old, "clone") else old))
        container[key] = value

    def later(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` when the changes are taken back."""
        self._undo.append(undo)

    def take_back(self) -> None:
        """Undo everything."""
        while self._undo:
            self._undo.pop()()


@dataclass
class Call(Changes):
    """One call of a tapped method. ``result`` is native; ``show`` gives the guard, and nobody else, another one."""

    this: Any
    args: list[Any]
    kwargs: dict[str, Any]
    result: Any = None
    shown: Any = None
    _undo: list[Callable[[], object]] = field(default_factory=list)

    def show(self, result: Any) -> None:
        """Let the guard see ``result``."""
        self.shown = result


class Point(NamedTuple):
    """A tapped method and the fault's methods that are asked there.

    ``before`` is asked before the guard and the native method, ``after`` between the native method and the guard.
    ``lasting``: what ``after`` changes stays until the model runner is about to work, so that the guard beside it looks
    at the changed object too.
    """

    name: str
    before: str | None = None
    after: str | None = None
    lasting: bool = False


SCHEDULER = (
    Point("schedule", after="scheduled", lasting=True),
    Point("update_from_output", before="reported", after="updated"),
)
RUNNER = (
    Point("execute_model", before="handed_over"),
    Point("prepare_attn", after="planned"),
    Point("prepare_dummy_attn", after="dummy_planned"),
    Point("postprocess_sampled", before="sampled"),
    Point("_build_attention_metadata", before="planned"),
)
POOL = (
    Point("get_new_blocks", after="allocated"),
    Point("touch"),
    Point("free_blocks", after="released"),
)
CONNECTOR = (
    Point("get_num_new_matched_tokens", after="matched"),
    Point("update_state_after_alloc", after="load_targeted"),
)


class Taps:
    """All taps of one engine. At most one fault is planted at a time."""

    def __init__(self) -> None:
        self.fault: TraceFault | None = None
        self.output: Any = None
        """The SchedulerOutput the runner is about to work on."""
        self.batch: Any = None
        """The InputBatch of model runner V2's last plan."""
        self._open: dict[str, Call] = {}
        self._lasting = Changes()
        self._withheld = False

    def below(self, owner: type, points: tuple[Point, ...]) -> None:
        """Tap a class under the guard, before any object of it exists."""
        for point in points:
            native = getattr(owner, point.name, None)
            if native is not None:
                setattr(owner, point.name, self._inner(point, native))

    def above(self, owner: Any, points: tuple[Point, ...]) -> None:
        """Tap an object over the guard."""
        for point in points:
            guarded = getattr(owner, point.name, None)
            if guarded is not None:
                setattr(owner, point.name, self._outer(point, guarded, owner))

    @contextlib.contextmanager
    def withheld(self) -> Iterator[None]:
        """Let the guard hear calls of the block pool that do not reach the pool."""
        self._withheld = True
        try:
            yield
        finally:
            self._withheld = False

    def _outer(self, point: Point, guarded: Callable[..., Any], owner: Any) -> Callable[..., Any]:
        def outer(*args: Any, **kwargs: Any) -> Any:
            call = Call(owner, list(args), kwargs)
            beside = self._open.get(point.name)
            self._open[point.name] = call
            try:
                if point.name == "execute_model":
                    self.output = args[0]
                self._ask(point.before, call)
                result = guarded(*call.args, **call.kwargs)
                return result if call.shown is None else call.result
            finally:
                call.take_back()
                if beside is None:
                    self._open.pop(point.name, None)
                else:
                    self._open[point.name] = beside

        return outer

    def _inner(self, point: Point, native: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(native)
        def inner(this: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._open.get(point.name)
            if call is None or call.this is not this:
                return native(this, *args, **kwargs)
            if self._withheld:
                return None
            if point.before is not None:
                call.take_back()
                args, kwargs = tuple(call.args), call.kwargs
            if point.name == "execute_model":
                self._lasting.take_back()
            call.result = native(this, *args, **kwargs)
            if point.name == "prepare_attn":
                self.batch = args[0]
            if point.after is not None:
                call.args = list(args)  # what the guard made of them, lists for iterators
                self._ask(point.after, call)
                if point.lasting:
                    self._lasting.later(_moved(call).take_back)
            return call.result if call.shown is None else call.shown

        return inner

    def _ask(self, handler: str | None, call: Call) -> None:
        fault = self.fault
        if fault is None or handler is None:
            return
        if handler == "planned" and call.result is None and call.kwargs.get("num_scheduled_tokens") is None:
            handler = "dummy_planned"  # model runner V1 has one method for both
        if fault.expected is not None and handler not in fault.follows:
            return
        if handler == "planned":
            fault.planned(plan_v1(call) if call.result is None else plan_v2(call))
        else:
            getattr(fault, handler)(call)


def _moved(call: Call) -> Changes:
    """The changes of a call, no longer its own."""
    changes = Changes()
    changes._undo, call._undo = call._undo, []
    return changes
