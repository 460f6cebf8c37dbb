"""A violation in words: what happened, as far as the log shows it, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvproof.findings.text import counted
from kvproof.trace.reader.log import number

if TYPE_CHECKING:
    from kvproof.trace.reader.explain import Explanation

POOL = ("look at the block pool's reference counts: who took and who gave back the block is listed below",)
ADVICE: dict[str, tuple[str, ...]] = {
    "schedule": ("the declaration itself is wrong: look at the scheduler, and at any plug-in that replaces it",),
    "binding": (
        "the declaration itself is wrong: look at the KV-cache manager and the block pool, and at any plug-in that "
        "replaces them",
    ),
    "handover": ("scheduler and worker saw different steps: look at the executor, and at who changes SchedulerOutput",),
    "write": (
        "look at the worker: its block table, its slot mapping, the runner's order of requests",
        "run the same requests with full_check_every 1, which compares whole rows in every step",
    ),
    "read": (
        "look at the worker: its block table, its sequence lengths, the runner's order of requests",
        "run the same requests with full_check_every 1, which compares whole rows in every step",
    ),
    "dummy": ("a dummy run would write into live blocks: look at the runner's dummy run and its slot buffer",),
    "speculation": ("look at the rejection sampler, and at the mapping of batch rows to request states",),
    "connector": (
        "look at the KV connector: what its scheduler side answered and what its worker side reported in this step",
        "prove the connector without a device: kvproof check MODEL --connector NAME",
    ),
    "result": ("look at the order of results, and at req_ids against req_id_to_index in the runner's output",),
    "lifecycle": POOL,
    "content": ("the bytes are not those that were written: look at transfers, and at other writers of the block",),
}
"""Where to look, by the violation's family."""

OTHERWISE = ("compare what was expected with what was found, at the place named above",)


def story(found: Explanation) -> Iterator[str]:
    """What happened, in sentences."""
    place = found.place
    if found.bind is None:
        yield (
            f"Step {place.step}: its kv.bind is not in the log, so what was declared is not known."
            if place.step is not None
            else "The violation stands outside a step, before any step was bound."
        )
    else:
        yield from _step(found)
    if place.request is not None:
        yield from _request(found, place.request)
    if found.block is not None:
        yield from _block(found, found.block)
    if found.same_step:
        rules = ", ".join(f"{rule} {count:,}" for rule, count in found.same_step.items())
        yield f"Violated in the same step too: {rules}."
    for error in found.errors[:3]:
        yield f"In the same step {error}"


def advice(found: Explanation) -> Iterator[str]:
    """What to do next, the most useful first."""
    event = found.violation
    if found.number > 1:
        yield "look at violation 1 first: later ones often follow from it"
    yield from ADVICE.get(str(event.get("family")), OTHERWISE)
    others = {name for name, _, _ in found.holders} - {found.place.request}
    if others and found.block:
        yield f"doubt the other request's answer as well: {', '.join(sorted(others)[:3])} uses block {found.block}"
    if event.get("rule") == "handover_missing_trace":
        yield "this rule never raises: look for a kv.error of the scheduler's guard, which could not be put in place"
    elif event.get("action") == "log":
        yield "to stop at the first wrong step, set kv_trace.action to raise"


def _step(found: Explanation) -> Iterator[str]:
    assert found.bind is not None
    if number(found.violation, "step") is None:
        yield f"The violation stands outside a step; the last step bound before it is {found.place.step}."
    total = sum(entry.tokens or 0 for entry in found.scheduled)
    budget, declared = number(found.bind, "budget"), number(found.bind, "total")
    limit = f" of at most {budget:,}" if budget is not None else ""
    yield (
        f"Step {found.place.step}: the scheduler gave {counted(len(found.scheduled), 'request')} "
        f"{counted(total, 'token')}{limit}."
    )
    if declared is not None and declared != total:
        yield f"It declared a total of {counted(declared, 'token')}, which is not that sum."


def _request(found: Explanation, request: str) -> Iterator[str]:
    mine, row, place = found.mine, found.row, found.place
    if mine is not None and mine.start is not None and mine.tokens is not None:
        yield f"{request} ({mine.state}) was given {_given(mine.start, mine.tokens, mine.drafts)}."
    elif found.bind is not None:
        yield f"{request} was not scheduled in this step."
    if row is None:
        yield f"No blocks of {request} were declared before this step."
        return
    if row.gone:
        yield f"{request} was {row.gone}, and its row with it."
    blocks = row.groups.get(place.group) if place.group is not None else None
    if blocks is None:
        return
    if place.column is not None:
        per = f"{place.size}" if place.dcp == 1 else f"{place.size} × {place.dcp} ranks"
        where = f"Position {place.position} lies in column {place.column} ({per} tokens a column)"
        yield (
            f"{where}, declared as block {blocks[place.column]}."
            if place.column < len(blocks)
            else f"{where}, but the row has {counted(len(blocks), 'column')}."
        )
    for written in found.writes:
        if (written.step, written.group) != (place.step, place.group) or written.block is None:
            continue
        span = range(written.block, (written.last_block or written.block) + 1)
        strange = next((block for block in span if block not in blocks), None)
        if strange is not None:
            last = written.slot + written.length - 1
            slots = f"slot {written.slot}" if written.length == 1 else f"slots {written.slot}–{last}"
            yield (
                f"Worker {written.rank} planned to write {slots}, in block {strange}, which is not in the declared "
                f"row of {request}."
            )
            break


def _given(start: int, tokens: int, drafts: int | None) -> str:
    among = f", {counted(drafts, 'draft')} among them" if drafts else ""
    last = start + tokens - 1
    span = f"position {last}" if tokens == 1 else f"positions {start}–{last}"
    return f"{counted(tokens, 'token')}{among}: {span}"


def _block(found: Explanation, block: int) -> Iterator[str]:
    if block == 0:
        yield "Block 0 is the null block: nobody owns it, what is written there is lost, what is read there is padding."
        return
    place = found.place
    others = [(name, group, column) for name, group, column in found.holders if name != place.request]
    if others:
        places = ", ".join(f"{name} (group {group}, column {column})" for name, group, column in others[:3])
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        yield f"Block {block} is declared at this step for {places}{more}."
    elif found.holders:
        yield f"Block {block} is declared at this step for {place.request} alone."
    else:
        yield f"Block {block} is declared for no live request at this step."
    slot, size, kind = place.slot, place.size, (found.group or {}).get("kind")
    if others and slot is not None and size and slot // size == block and place.dcp == 1 and kind == "full":
        name, _, column = others[0]
        position, end = column * size + slot % size, found.ends.get(name)
        if end is not None and position < end:
            yield f"Slot {slot} is the place of position {position} of {name}, which has {end:,} tokens by now."
    for last in reversed(found.history):
        if last.what in ("handed out", "freed"):
            given = last.what == "handed out"
            whom = "" if last.request is None else f" {'to' if given else 'by'} {last.request}"
            when = f" at step {last.first_step}" if last.first_step is not None else ""
            yield f"It was last {'handed out' if given else 'given back'}{whom}{when}."
            break
