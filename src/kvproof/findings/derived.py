"""Counters that follow from layers × blocks: worked out again from block tables and layout, compared with the count.

A run that counted what its own layout and schedule say has not lost or invented a byte, whatever the platform. Derived
are, for every group whose rows belong to tokens:

- ``computed``: rows complete in the tokens of every step × bytes of a row × layers;
- ``restored``: rows of the hit that the next query still reads × bytes of a row × layers.

States (Mamba, linear attention) are not derived: when vLLM keeps one is its own policy, not arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvproof.layout import Group, Layout, Resource

NULL_BLOCK = 0


@dataclass(frozen=True)
class Derived:
    """One counter of one group, in bytes: what the run counted, and what follows from layout and block tables."""

    name: str
    counted: int
    derived: int

    @property
    def holds(self) -> bool:
        return self.counted == self.derived


def derived(
    layout: Layout, groups: Iterable[Mapping[str, Any]], records: Iterable[Mapping[str, Any]]
) -> tuple[Derived, ...]:
    """The counters of a run. ``groups`` are the report's, ``records`` the lines of its transcript."""
    counted = {int(group["group"]): group for group in groups}
    steps = [request for record in records for request in record.get("requests", ())]
    first_steps = {request["request"]: request for request in reversed(steps)}
    found = []
    for group in layout.groups:
        mine = layout.group_resources(group.id)
        if group.rule == "state" or group.id not in counted or any(r.tokens_per_row == 0 for r in mine):
            continue
        computed = sum(_computed(r, group, request) for r in mine for request in steps)
        restored = sum(_restored(r, group, request) for r in mine for request in first_steps.values())
        for name, nbytes in (("computed", computed), ("restored", restored)):
            found.append(Derived(f"{name} bytes of group {group.id}", int(counted[group.id][f"{name}_bytes"]), nbytes))
    return tuple(found)


def _computed(r: Resource, group: Group, request: Mapping[str, Any]) -> int:
    begin = int(request["computed"])
    return sum(_rows(r, group, request, begin, begin + int(request["scheduled"])).values()) * r.row_bytes


def _restored(r: Resource, group: Group, request: Mapping[str, Any]) -> int:
    """Bytes of the blocks of an external hit that must have come back, at the request's first step."""
    local, external, computed = (int(request[key]) for key in ("local", "external", "computed"))
    if not external or not computed or group.rule == "recomputed":
        return 0
    begin = max(0, computed - group.window + 1) if group.rule == "window" else 0
    wanted = _rows(r, group, request, begin, min(computed, local + external))
    loaded = _rows(r, group, request, local, local + external)
    return sum(rows for index, rows in wanted.items() if index in loaded) * r.row_bytes


def _rows(r: Resource, group: Group, request: Mapping[str, Any], begin: int, end: int) -> dict[int, int]:
    """Index in the block table -> rows complete in tokens [begin, end), null blocks left out."""
    table = request["tables"][group.id]
    first, last, per_block = begin // r.tokens_per_row, end // r.tokens_per_row, group.block_size // r.tokens_per_row
    rows = {}
    for index in range(first // per_block, -(-last // per_block)):
        count = min(last, (index + 1) * per_block) - max(first, index * per_block)
        if count > 0 and index < len(table) and table[index] != NULL_BLOCK:
            rows[index] = count
    return rows
