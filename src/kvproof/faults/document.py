"""docs/faults.md, written from the catalogue.

    python -m kvproof.faults.document > docs/faults.md
"""

from __future__ import annotations

import inspect

from kvproof.faults import stories
from kvproof.faults.catalogue import CATALOGUE, KINDS
from kvproof.faults.model import Fault
from kvproof.faults.trace.document import section

HEAD = """# Planted faults

This page is written from the code (`python -m kvproof.faults.document > docs/faults.md`); a test compares them.

`kvproof faults` plants {count} faults, one at a time, in a working production connector and asks whether the check sees
them. Planning stays vLLM's and the connector's own: a fault changes one transfer, one answer or one moment.

**Caught** means all of this:

1. The fault acted. One that never did any damage is a failed proof ("never planted"), not a pass.
2. The oracle named in the table reports it, and its location is the place of the damage exactly: group, layer,
   resource, block and byte. Where no byte is wrong (a hit that is too short) the location is the request, and where
   vLLM or the connector stops with an exception it is the scenario, reported by `lifecycle`.
3. Every other page that the first wrong transfer left wrong is named by some finding, at its first wrong byte.

The place is not asked of the code under test. A witness watches the connector's own plan before the fault changes it: a
save shows the true bytes of a page, a load says which pages they belong to. It then compares memory with what a right
transfer would have left there. It uses neither the byte code nor the ledger.

Before the faults and after them the same stories run without a fault; they must be clean. Faults that may stop the
engine come last, and the engine is started again when one did.

## Errors that cancel

A change that is the same on both ways and depends on nothing but the place inside the page (both heads exchanged on
save and again on load) gives back the bytes that were there. Whoever reads the cache cannot tell, so it is not a fault
of the cache; a second reader with another program could. A change on both ways that depends on anything else does not
cancel, because kvproof never lets a prompt come back in the blocks it was saved from:
`block-off-by-one-both-ways`, `rows-turned-by-block`, `scale-of-block`. And leaving something out on both ways is the
oldest symmetric error: `layer-skipped-both-ways`."""


def document() -> str:
    """The whole page."""
    parts = [HEAD.format(count=len(CATALOGUE))]
    for kind, faults in KINDS.items():
        parts.append(f"\n## {kind.capitalize()}\n\n{_module_line(faults[0])}\n")
        parts.append("| fault | stands for | caught by | what is wrong |")
        parts.append("| --- | --- | --- | --- |")
        parts += [_row(fault) for fault in faults]
    parts.append("\n## Stories\n\n| story | what happens |\n| --- | --- |")
    parts += [f"| {name} | {inspect.getdoc(story)} |" for name, story in stories.STORIES.items()]
    parts.append("\n## Not applicable\n\n| fault | connector | why |\n| --- | --- | --- |")
    parts += [
        f"| `{fault.name()}` | {connector} | {reason} |"
        for fault in CATALOGUE.values()
        for connector, reason in fault.unfit.items()
    ]
    return "\n".join(parts) + "\n" + section()


def _module_line(fault: type[Fault]) -> str:
    """What the faults of this module have in common, without the module's name."""
    line = (inspect.getmodule(fault).__doc__ or "").strip().splitlines()[0]
    common = line.partition(": ")[2]
    return common[:1].upper() + common[1:]


def _row(fault: type[Fault]) -> str:
    where = f" ({fault.model})" if fault.model != Fault.model else ""
    return (
        f"| `{fault.name()}` | {', '.join(fault.stands_for)} | {fault.oracle} | {fault.summary()} "
        f"Story: {fault.story}{where}. |"
    )


if __name__ == "__main__":
    print(document(), end="")
