"""The part of docs/faults.md about faults in a running engine, written from the catalogue."""

from __future__ import annotations

import inspect

from kvproof.faults.trace.catalogue import CATALOGUE, KINDS, UNREACHABLE
from kvproof.faults.trace.model import TraceFault
from kvproof.faults.trace.stage import ENGINES, STORIES
from kvproof.trace.rules.catalogue import RULES

HEAD = """
# Faults in a running engine

`kvproof faults --trace` plants {count} faults in real vLLM engines that the guard ([trace.md](trace.md)) watches, and
asks whether the guard names each one: {rules} of its {all} rules are made to fire, the others cannot be reached on the
CPU build.

A fault changes one native object in one step: a field of the SchedulerOutput, a block id, a count of the block pool, an
entry of a slot mapping or of a block table, a connector's report, a row of the result. It is changed just before the
guard looks and put back right after, before vLLM uses it, so the engine goes on and the next fault finds it whole (only
`prefix-of-another` stays, because it does no harm but to its own request). The guard's own state and functions are not
touched: it sees what vLLM's methods are given and give back, and it is read through its log, as any user reads it.

**Caught** means all of this:

1. The fault acted in its step.
2. The rule named in the table fired in that step at exactly one place, and request, group, block, slot and position are
   those that the fault has worked out from vLLM's own objects. A field that is empty in the one is empty in the other.
3. Nothing of the guard itself failed, the engine came to rest, and a request served afterwards is clean.

Before the faults and after them all stories run without a fault in the same engine; the guard must be silent."""


def section() -> str:
    """The part, as Markdown."""
    reached = {planted.fault.rule for planted in CATALOGUE.values()}
    parts = [HEAD.format(count=len(CATALOGUE), rules=len(reached), all=len(RULES))]
    parts.append("\n## Engines\n\n| engine | what it is |\n| --- | --- |")
    parts += [f"| {name} | {engine.summary} |" for name, engine in ENGINES.items()]
    for kind, faults in KINDS.items():
        parts.append(f"\n## Guard: {kind}\n\n{_common(faults[0])}\n")
        parts.append("| fault | rule | engines | what is wrong |\n| --- | --- | --- | --- |")
        parts += [
            f"| `{fault.base_name()}` | `{fault.rule}` | {', '.join(fault.engines)} | {fault.summary()} "
            f"Story: {fault.story}. |"
            for fault in faults
        ]
    parts.append("\n## Stories of the running engine\n\n| story | what happens |\n| --- | --- |")
    parts += [f"| {name} | {inspect.getdoc(story)} |" for name, story in STORIES.items()]
    parts.append("\n## Rules no fault reaches on the CPU build\n\n| rule | why |\n| --- | --- |")
    parts += [f"| `{rule}` | {reason} |" for rule, reason in UNREACHABLE.items()]
    return "\n".join(parts) + "\n"


def _common(fault: type[TraceFault]) -> str:
    """What the faults of this module have in common."""
    line = (inspect.getmodule(fault).__doc__ or "").strip().splitlines()[0]
    common = line.partition(": ")[2]
    return common[:1].upper() + common[1:]
