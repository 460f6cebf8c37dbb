"""An explanation on the screen, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kvproof.findings.text import counted, printable
from kvproof.trace.reader.explain import Explanation
from kvproof.trace.reader.log import items, number
from kvproof.trace.reader.summary import cells, moment, table_of

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

SHOWN = 12
"""Rows of a table on the screen; --json has all."""

RUNS = 6
"""Runs of one step that are shown: a prefill over scattered blocks has hundreds."""


def render(found: Explanation, console: Console) -> None:
    """Print ``found``, readable at 80 columns."""
    from rich.text import Text

    console.print(_head(found))
    for title, lines in (("What happened", found.story), ("What to do next", found.next)):
        if lines:
            console.print(_listing(title, lines))
    for table in (_step(found), _row(found), _crossings(found), _plans(found), _history(found)):
        if table is not None:
            console.print(table)
            console.print()
    others = found.total - 1
    if others:
        rules = ", ".join(f"{name} {count:,}" for name, count in found.rules.items())
        console.print(Text(printable(f"{counted(found.total, 'violation')} in this log: {rules}")))
        console.print(Text("others: kvproof trace explain PATH --number N, or --rule NAME", style="dim"))
    else:
        console.print(Text("It is the only violation in this log.", style="dim"))


def _head(found: Explanation) -> RenderableType:
    from rich import box
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    event, rule = found.violation, found.rule
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    step = event.get("step")
    try:
        clock = datetime.fromtimestamp(event["time"], UTC).strftime("%H:%M:%S.%f")[:-3]
        when = f"{moment(event['time']).split()[0]} {clock} UTC"
    except (ValueError, OverflowError, OSError, IndexError):
        when = str(event["time"])
    place = [f"{name} {event[name]}" for name in ("request", "group", "block", "slot", "position")
             if event.get(name) is not None]  # fmt: skip
    rows: list[tuple[str, str, str]] = [
        ("expected", str(event.get("expected", "")), "green"),
        ("found", str(event.get("found", "")), "bold red"),
        ("where", ", ".join(place) or "the whole step", ""),
        ("when", f"step {step}, {when}" if step is not None else f"outside a step, {when}", ""),
        ("seen by", f"{found.who}, pid {event.get('pid')}, engine {event.get('engine') or '–'}", ""),
    ]
    if rule is None:
        rows.append(("rule", "not known to this version of kvproof", "yellow"))
    else:
        rows += [("holds when", rule["predicate"], ""), ("judged from", ", ".join(rule["fields"]), "")]
        if rule["meaning"]:
            rows.insert(0, ("meaning", rule["meaning"], "bold"))
    if found.group is not None:
        g = found.group
        window = f", window {g['window']} tokens" if g.get("window") else ""
        rows.append(("group", f"{g.get('index')}: {g.get('kind')}, {g.get('block_size')} tokens a block, "
                              f"{g.get('num_blocks')} blocks{window}", ""))  # fmt: skip
    for name, value, style in rows:
        grid.add_row(name, Text(printable(value), style=style))
    title = Text.assemble(
        (printable(str(event.get("rule"))), "bold red"), f"  violation {found.number} of {found.total}"
    )
    return Panel(grid, title=title, title_align="left", box=box.ROUNDED, border_style="red")


def _listing(title: str, lines: Sequence[str]) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=1, style="dim")
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row("·", Text(printable(line)))
    return Group(Text(title, style="bold"), grid, Text())


def _step(found: Explanation) -> RenderableType | None:
    if not found.scheduled or found.bind is None:
        return None
    mine = found.violation.get("request")
    title = f"Step {found.bind.get('step')}: what the scheduler declared (tokens)"
    table = table_of(title, "request", "state", "start", "tokens", "drafts", right=("start", "tokens", "drafts"))
    shown = sorted(found.scheduled, key=lambda s: s.request != mine)[:SHOWN]
    for s in shown:
        table.add_row(
            *cells(s.request, s.state, s.start, s.tokens, s.drafts), style="bold" if s.request == mine else ""
        )
    if len(found.scheduled) > len(shown):
        table.add_row(*cells(f"and {len(found.scheduled) - len(shown):,} more"))
    for how in ("finished", "preempted"):
        gone = [str(request) for request in items(found.bind, how)]
        if gone:
            more = f" and {len(gone) - 3:,} more" if len(gone) > 3 else ""
            table.add_row(*cells(", ".join(gone[:3]) + more, how))
    return table


def _row(found: Explanation) -> RenderableType | None:
    if found.row is None or not found.row.groups:
        return None
    gone = f", {found.row.gone}" if found.row.gone else ""
    title = f"Block table of {printable(found.row.request)} as declared{gone}"
    table = table_of(title, "group", "blocks", "column: block", right=("group", "blocks"))
    for group, blocks in sorted(found.row.groups.items()):
        column = found.place.column if group == found.place.group else None
        table.add_row(*cells(group, len(blocks)), row_text(blocks, found.block, column))
    return table


def row_text(blocks: Sequence[int | None], mark: int | None, at: int | None = None) -> Text:
    """A row as ``column:block``: its beginning, its end, and what lies around the marked block and column."""
    from rich.text import Text

    near = {c for c, block in enumerate(blocks) if block == mark and mark}  # the null block may fill half the row
    near |= {at} if at is not None else set()
    keep = {*range(4), *range(len(blocks) - 4, len(blocks)), *(c + d for c in near for d in (-2, -1, 0, 1, 2))}
    text, last = Text(), -1
    for column in sorted(c for c in keep if 0 <= c < len(blocks)):
        block = blocks[column]
        text.append("  " if last >= 0 else "")
        if column > last + 1:
            text.append("…  ", style="dim")
        text.append(f"{column}:", style="dim")
        text.append("?" if block is None else str(block), style="bold red" if column in near else "")
        last = column
    return text


def _crossings(found: Explanation) -> RenderableType | None:
    if not found.crossings:
        return None
    title = f"What was said of {printable(str(found.place.request))}"
    table = table_of(title, "step", "boundary", "tokens, blocks and answers", right=("step",))
    for crossing in found.crossings:
        table.add_row(*cells("–" if crossing.step is None else str(crossing.step), crossing.kind, crossing.detail))
    return table


def _plans(found: Explanation) -> RenderableType | None:
    if not found.writes and not found.reads:
        return None
    from rich.text import Text

    rank = (found.writes or found.reads)[0].rank
    title = f"What worker {rank} planned for {printable(str(found.violation.get('request')))}"
    table = table_of(title, "step", "plan", "group", "place", right=("step", "group"))
    at = number(found.bind, "step") if found.bind is not None else number(found.violation, "step")
    for step, planned in sorted(_by_step(found).items()):
        # The violation's own block is shown wherever it stands among the runs.
        shown = sorted(range(len(planned)), key=lambda i: (not planned[i].marked, i))[:RUNS]
        for index in sorted(shown):
            entry = planned[index]
            table.add_row(*cells(str(step), entry.plan, entry.group, entry.place), style="bold" if step == at else "")
        if len(planned) > RUNS:
            table.add_row(*cells("", "", ""), Text(f"and {len(planned) - RUNS:,} more", style="dim"))
    return table


@dataclass(frozen=True, slots=True)
class _Planned:
    plan: str
    group: int | None
    place: str
    marked: bool = False


def _by_step(found: Explanation) -> dict[int, list[_Planned]]:
    steps: dict[int, list[_Planned]] = {}
    for w in found.writes:
        place = f"{counted(w.length, 'slot')} without a write (−1)"
        if w.slot >= 0:
            place = f"slot {w.slot}" if w.length == 1 else f"slots {w.slot}–{w.slot + w.length - 1}"
        marked = False
        if w.block is not None and w.last_block is not None:
            place += f", block {w.block}" if w.block == w.last_block else f", blocks {w.block}–{w.last_block}"
            marked = found.block is not None and w.block <= found.block <= w.last_block
        steps.setdefault(w.step or 0, []).append(_Planned("write", w.group, place, marked))
    for r in found.reads:
        blocks = " ".join(map(str, r.blocks[:16])) + (" …" if len(r.blocks) > 16 else "")
        listed = f", {'whole row' if r.whole else f'new columns from {r.first}'}: {blocks}" if r.blocks else ""
        place = f"context {r.seq_len} tokens{listed}"
        steps.setdefault(r.step or 0, []).append(_Planned("read", r.group, place, not listed))
    return steps


def _history(found: Explanation) -> RenderableType | None:
    if found.block is None:
        return None
    title = f"Block {found.block}, {found.block_from}"
    table = table_of(title, "step", "what", "request", "place", right=("step",))
    if found.history_lost:
        table.add_row("", *cells(f"{found.history_lost:,} earlier, left out"))
    for h in found.history:
        step = "–" if h.first_step is None else str(h.first_step)
        if h.last_step != h.first_step:
            step += f"–{h.last_step}"
        style = "bold" if h.request is not None and h.request == found.violation.get("request") else ""
        detail = h.detail
        if h.slots is not None:
            first, stop = h.slots
            detail = f"slot {first}" if stop == first + 1 else f"slots {first}–{stop - 1}"
        table.add_row(*cells(step, h.what, h.request, detail), style=style)
    return table if table.row_count else None
