"""The scenarios of each mode.

``bulk``: one request at a time (the two of the last scenario come back together), whole prompts in one step.
``layerwise``: prompts in chunks that end inside blocks, so every layer's hooks run many times per request. ``async``:
several requests at once, decoding while others load.
In all of them a layer is judged at the moment it would read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kvproof.engine.harness import Harness

VOCABULARY = 20_000
"""Token ids are drawn below this; every bundled model's vocabulary is larger."""
FIRST_TOKEN = 100


class Prompts:
    """Fresh prompts: token ids from a seeded generator, so no two share a prefix by accident."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def fresh(self, length: int) -> list[int]:
        return self._rng.integers(FIRST_TOKEN, VOCABULARY, length).tolist()  # type: ignore[no-any-return]


Step = tuple[str, Callable[[], None]]


def scenarios(harness: Harness, mode: str, tokens: int, unit: int, prompts: Prompts) -> Iterator[Step]:
    """(name, what to do) of every scenario of ``mode``; ``tokens`` is the longest prompt, ``unit`` the hit unit."""
    blocks = max(1, tokens // unit)
    if mode == "bulk":
        whole = blocks * unit
        longer = prompts.fresh(unit // 2 + 3)
        for length in dict.fromkeys((whole, whole + 1, whole - 1, tokens)):
            if unit < length <= tokens + 1:
                yield f"bulk/{length}", _repeat(harness, prompts.fresh(length), longer if length == whole else [])
        yield "bulk/local+external", _local_and_external(harness, prompts.fresh(blocks * unit + 5), unit)
        yield "bulk/reuse", _reused(harness, prompts, unit)
    elif mode == "layerwise":
        length = (blocks - 1) * unit + unit // 3 + unit if blocks > 1 else unit + unit // 3
        chunk = unit * 2 // 3 + 1
        yield f"layerwise/{length}", _chunked(harness, prompts.fresh(length), prompts.fresh(unit), chunk)
    elif mode == "async":
        yield "async/together", _together(harness, prompts, min(blocks, 3) * unit, unit)
    else:
        raise ValueError(f"mode {mode!r} has no scenarios, expected bulk, layerwise or async")


def _repeat(harness: Harness, prompt: list[int], suffix: list[int]) -> Callable[[], None]:
    """Compute a prompt, forget it, get it back; then, with a ``suffix``, again inside a longer prompt."""

    def tell() -> None:
        _one(harness, "cold", prompt)
        _one(harness, "again", prompt)
        if suffix:
            _one(harness, "longer", prompt + suffix)

    return tell


def _one(harness: Harness, label: str, prompt: list[int], **options: Any) -> None:
    harness.submit(label, prompt, **options)
    harness.run()
    harness.reset()


def _local_and_external(harness: Harness, prompt: list[int], unit: int) -> Callable[[], None]:
    """The first block comes from the local cache, the rest from the connector."""

    def tell() -> None:
        _one(harness, "cold", prompt)
        harness.submit("head", prompt[: unit + 1])
        harness.run()
        harness.submit("whole", prompt)
        harness.run()
        harness.reset()

    return tell


def _reused(harness: Harness, prompts: Prompts, unit: int) -> Callable[[], None]:
    """The blocks of a prompt are computed for another one in the very next step, and both have the same tokens behind
    their first block: a save that comes too late and a key without its prefix bring back the other one's bytes.

    Whole blocks, so that the last step before the change of owners completes one, whose save may still be owed."""
    tail = prompts.fresh(unit)
    a, b, more = prompts.fresh(unit) + tail, prompts.fresh(unit) + tail, prompts.fresh(5)

    def tell() -> None:
        harness.submit("a", a)
        harness.run(settle=False)
        harness.scramble(again=True)
        _one(harness, "b", b)
        for label, prompt in (("a again", a + more), ("b again", b + more)):
            harness.submit(label, prompt)
        harness.run()
        harness.reset()

    return tell


def _chunked(harness: Harness, prompt: list[int], suffix: list[int], chunk: int) -> Callable[[], None]:
    """Everything in chunks that end inside blocks."""

    def tell() -> None:
        scheduler = harness.staged.core.scheduler
        whole = scheduler.max_num_scheduled_tokens
        # Platforms that switch chunked prefill off (MLA on a CPU without AMX) run the same story in whole prompts.
        if scheduler.scheduler_config.enable_chunked_prefill:
            scheduler.max_num_scheduled_tokens = chunk
        try:
            _one(harness, "cold", prompt, output_tokens=3)
            _one(harness, "again", prompt, output_tokens=3)
            _one(harness, "longer", prompt + suffix, output_tokens=3)
        finally:
            scheduler.max_num_scheduled_tokens = whole

    return tell


def _together(harness: Harness, prompts: Prompts, length: int, unit: int) -> Callable[[], None]:
    """Several requests at once: distinct, sharing a block, identical; decoding while others load."""
    a, b = prompts.fresh(length + 7), prompts.fresh(length - unit // 3)
    shares = a[:unit] + prompts.fresh(unit // 2)

    def tell() -> None:
        for label, prompt in (("a", a), ("b", b), ("shares", shares)):
            harness.submit(label, prompt, output_tokens=4)
        harness.run()
        harness.reset()
        for label, prompt in (("a again", a), ("b again", b), ("new", prompts.fresh(unit + 1))):
            harness.submit(label, prompt, output_tokens=4)
        harness.step()
        harness.submit("shares again", shares, output_tokens=4)
        harness.run()
        harness.reset()
        for label in ("a twin 1", "a twin 2"):
            harness.submit(label, a, output_tokens=2)
        harness.run()
        harness.reset()

    return tell
