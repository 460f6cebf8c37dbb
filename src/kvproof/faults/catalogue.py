"""All faults, in the order they are run and listed."""

from __future__ import annotations

from kvproof.faults import addresses, answers, contents, omissions, timing
from kvproof.faults.model import Fault

KINDS: dict[str, tuple[type[Fault], ...]] = {
    "omissions": omissions.FAULTS,
    "addresses": addresses.FAULTS,
    "contents": contents.FAULTS,
    "timing": timing.FAULTS,
    "answers": answers.FAULTS,
}
CATALOGUE: dict[str, type[Fault]] = {fault.name(): fault for faults in KINDS.values() for fault in faults}


def select(names: list[str]) -> list[type[Fault]]:
    """The faults with these names, all for none. ValueError for a name that is not in the catalogue."""
    for name in names:
        if name not in CATALOGUE:
            raise ValueError(f"--only {name}: not one of the {len(CATALOGUE)} faults that kvproof faults --list names")
    return [fault for name, fault in CATALOGUE.items() if not names or name in names]
