"""Stories: the shortest request sequences in which the faults can do harm. Told with fresh prompts every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvproof.scenarios.modes import Prompts

if TYPE_CHECKING:
    from kvproof.engine.harness import Harness

Story = Callable[["Harness", Prompts, int], None]
BLOCKS = 3
"""Full blocks of the main prompt."""


def _alone(harness: Harness, label: str, prompt: list[int], output_tokens: int = 1) -> None:
    harness.submit(label, prompt, output_tokens=output_tokens)
    harness.run()
    harness.reset()


def repeat(harness: Harness, prompts: Prompts, unit: int) -> None:
    """Compute a prompt, forget it, get it back."""
    prompt = prompts.fresh(BLOCKS * unit + 5)
    _alone(harness, "cold", prompt)
    _alone(harness, "again", prompt)


def longer(harness: Harness, prompts: Prompts, unit: int) -> None:
    """A stored prompt comes back as the head of a longer one."""
    prompt = prompts.fresh(BLOCKS * unit + 5)
    _alone(harness, "cold", prompt)
    _alone(harness, "longer", prompt + prompts.fresh(2 * unit))


def shortened(harness: Harness, prompts: Prompts, unit: int) -> None:
    """All of a prompt is stored first, then its head alone: a state was saved at two boundaries."""
    prompt = prompts.fresh(BLOCKS * unit + 5)
    # Not the head first: a request that goes on from a hit leaves no state at its last boundary on vllm-ascend, which
    # does not split the steps of a KV consumer there.
    _alone(harness, "cold", prompt)
    _alone(harness, "head", prompt[: unit + 5])
    _alone(harness, "again", prompt)


def local(harness: Harness, prompts: Prompts, unit: int) -> None:
    """The first block is cached locally, the rest comes from the connector."""
    prompt = prompts.fresh(BLOCKS * unit + 5)
    _alone(harness, "cold", prompt)
    harness.submit("head", prompt[: unit + 1])
    harness.run()
    _alone(harness, "whole", prompt)


def chunked(harness: Harness, prompts: Prompts, unit: int) -> None:
    """A prompt is computed in chunks that end inside blocks."""
    scheduler = harness.staged.core.scheduler
    whole, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, unit + unit // 3
    try:
        repeat(harness, prompts, unit)
    finally:
        scheduler.max_num_scheduled_tokens = whole


def together(harness: Harness, prompts: Prompts, unit: int) -> None:
    """Two stored prompts come back at the same time."""
    a, b = prompts.fresh(2 * unit + 5), prompts.fresh(2 * unit + 9)
    _alone(harness, "a", a)
    _alone(harness, "b", b)
    harness.submit("a again", a)
    harness.submit("b again", b)
    harness.run()
    harness.reset()


def neighbour(harness: Harness, prompts: Prompts, unit: int) -> None:
    """A stored prompt comes back while another request is decoding."""
    prompt = prompts.fresh(2 * unit + 5)
    _alone(harness, "cold", prompt)
    harness.submit("running", prompts.fresh(2 * unit + 3), output_tokens=8)
    harness.step()
    harness.step()
    harness.submit("again", prompt)
    harness.run()
    harness.reset()


def reuse(harness: Harness, prompts: Prompts, unit: int) -> None:
    """Between save and load every block of memory is computed for somebody else."""
    prompt = prompts.fresh(BLOCKS * unit + 5)
    _alone(harness, "cold", prompt)
    length = min(6 * unit, harness.staged.max_model_len - unit) + 1
    blocks = sum(-(-length // g.block_size) for g in harness.layout.groups)
    # Half as many again: a connector may hold blocks back until they are stored.
    for _ in range(-(-3 * harness.layout.num_blocks // (2 * blocks))):
        harness.submit("filler", prompts.fresh(length))
        harness.run()
    harness.reset()
    _alone(harness, "again", prompt)


STORIES: dict[str, Story] = {
    "repeat": repeat,
    "longer": longer,
    "shortened": shortened,
    "local": local,
    "chunked": chunked,
    "together": together,
    "neighbour": neighbour,
    "reuse": reuse,
}
