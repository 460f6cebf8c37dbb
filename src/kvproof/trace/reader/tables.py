"""Block tables as the scheduler declared them, rebuilt from the deltas of kv.bind."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvproof.trace.reader.log import Data, items, names, number


@dataclass
class Row:
    """One request's declared blocks per group. ``gone`` says how and at which step the row was dropped."""

    request: str
    groups: dict[int, list[int | None]] = field(default_factory=dict)
    declared: int | None = None
    last: int | None = None
    end: int | None = None
    gone: str = ""

    def columns(self, block: int, group: int | None) -> list[tuple[int, int]]:
        """(group, column) of each use of ``block``."""
        return [
            (index, column)
            for index, blocks in sorted(self.groups.items())
            if group is None or index == group
            for column, held in enumerate(blocks)
            if held == block
        ]


@dataclass
class Delta:
    """Blocks that one step declared for one request in one group."""

    request: str
    group: int
    first: int
    blocks: list[int]
    replaces: bool


def deltas(event: Data) -> list[Delta]:
    """What a kv.bind declares, in its order. ``replaces``: the request is new or resumed, its row starts over."""
    requests = items(event, "requests")
    fresh = {*names(event, "new", "resumed")}
    found = []
    for entry in items(event, "blocks"):
        if not isinstance(entry, list) or len(entry) != 4:
            continue
        who, group, first, blocks = entry
        if not all(isinstance(value, int) for value in (who, group, first)) or not isinstance(blocks, list):
            continue
        if 0 <= who < len(requests) and isinstance(requests[who], str):
            request = requests[who]
            found.append(Delta(request, group, first, [b for b in blocks if isinstance(b, int)], request in fresh))
    return found


class Tables:
    """The rows of all live requests of one scheduler. ``keep`` is remembered after its end too."""

    def __init__(self, keep: str | None = None):
        self.rows: dict[str, Row] = {}
        self._keep = keep
        self.last_kept: Row | None = None

    def apply(self, event: Data) -> None:
        """Take one kv.bind. Drops come first: a request may be preempted and resumed in the same step."""
        step = number(event, "step")
        for how in ("finished", "preempted"):
            for request in names(event, how):
                row = self.rows.pop(request, None)
                if row is not None and request == self._keep:
                    row.gone = f"{how} at step {step}"
                    self.last_kept = row
        for request in names(event, "new", "resumed"):
            self.rows[request] = Row(request, declared=step)
        for delta in deltas(event):
            row = self.rows.setdefault(delta.request, Row(delta.request, declared=step))
            blocks = row.groups.setdefault(delta.group, [])
            # A column the log does not show (its beginning was rotated away) stays unknown, not shifted.
            if delta.first >= 0 and delta.first - len(blocks) < 1 << 20:
                del blocks[delta.first :]
                blocks += [None] * (delta.first - len(blocks))
            blocks += delta.blocks
        for index, request in enumerate(items(event, "requests")):
            row = self.rows.get(request) if isinstance(request, str) else None
            if row is not None:
                row.last = step
                row.end = _end(event, index)

    def row(self, request: str) -> Row | None:
        """The row of ``request``, the last one it had when it is gone."""
        kept = self.last_kept if request == self._keep else None
        return self.rows.get(request) or kept

    def holders(self, block: int, group: int | None) -> list[tuple[str, int, int]]:
        """(request, group, column) of every declared use of ``block``."""
        return [(name, g, column) for name, row in self.rows.items() for g, column in row.columns(block, group)]


def _end(event: Data, index: int) -> int | None:
    start, tokens = items(event, "start"), items(event, "tokens")
    if index < len(start) and index < len(tokens) and isinstance(start[index], int) and isinstance(tokens[index], int):
        return int(start[index] + tokens[index])
    return None
