"""``kvproof faults --trace``: plants a fault for every rule of the guard in running engines and shows what it named."""

from __future__ import annotations

import argparse
import json

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvproof.cli.check import refuse
from kvproof.faults.trace.catalogue import CATALOGUE, KINDS, UNREACHABLE, select
from kvproof.faults.trace.model import Outcome, Place
from kvproof.faults.trace.run import TraceProof, prove
from kvproof.findings.text import counted, printable

PROOF_FAILED = 1


def run(args: argparse.Namespace) -> int:
    """0 if the proof holds, 1 if not, 2 for refused input."""
    console = Console()
    try:
        faults = select(args.only)
    except ValueError as error:
        return refuse("faults", error)
    if args.list:
        _list(console, args.json)
        return 0
    if args.json:
        proof = prove(faults, lambda text: None)
        print(json.dumps(proof.to_json(), indent=1))
    else:
        screen = Console(stderr=True)
        if screen.is_terminal:
            with screen.status("kv_trace") as status:
                proof = prove(faults, lambda text: status.update(text))
        else:
            proof = prove(faults, lambda text: screen.print(f"  {text}", highlight=False, markup=False, soft_wrap=True))
        render(proof, console)
    return 0 if proof.holds else PROOF_FAILED


def _list(console: Console, as_json: bool) -> None:
    if as_json:
        print(json.dumps([
            {
                "name": p.name, "summary": p.fault.summary(), "rule": p.fault.rule, "runner": p.runner,
                "engine": p.engine,
            }
            for p in CATALOGUE.values()
        ], indent=1))  # fmt: skip
        return
    for kind, faults in KINDS.items():
        console.print(f"\n[bold]{kind}[/bold]")
        for fault in faults:
            names = [p.name for p in CATALOGUE.values() if p.fault is fault]
            console.print(Text.assemble("  ", ("  ".join(names), "cyan"), f"  {fault.rule}"))
            console.print(Padding(Text(fault.summary()), (0, 0, 0, 6)))
    console.print("\n[bold]not reachable on the CPU build[/bold]")
    for rule, reason in UNREACHABLE.items():
        console.print(Text(f"  {rule}"))
        console.print(Padding(Text(reason), (0, 0, 0, 6)))


def render(proof: TraceProof, console: Console) -> None:
    """Faults against rules, the places, what was missed, the controls, the verdict."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Fault × rule", title_justify="left", title_style="bold")
    table.add_column("fault", overflow="fold", ratio=4)
    table.add_column("rule", overflow="fold", ratio=4)
    table.add_column("place, as the guard named it", overflow="fold", ratio=5)
    for outcome in proof.faults:
        table.add_row(outcome.name, _marks(outcome), Text(printable(_place(outcome))))
    console.print(table)
    console.print("●  must fire, and did, at this place   ○  fired too   ✗  must fire, did not")
    for control in proof.controls:
        word, style = ("clean", "green") if control.clean else ("NOT CLEAN", "bold red")
        console.print(Text.assemble(f"control {control.engine} {control.when}, {control.steps} steps: ", (word, style)))
        for message in control.findings:
            console.print(Text(f"  {printable(message)}"))
    for rule, reason in UNREACHABLE.items():
        console.print(Text(f"not reachable: {rule}: {reason}"))
    caught = sum(f.caught for f in proof.faults)
    word, style = ("PROVED", "bold green") if proof.holds else ("NOT PROVED", "bold red")
    console.print(
        Text.assemble(
            (word, style),
            f"  {caught} of {len(proof.faults)} planted faults caught at their exact place, "
            f"{counted(len(proof.rules), 'rule')}, "
            f"{proof.seconds:.0f} s",
        )
    )


def _marks(outcome: Outcome) -> Text:
    """The rule that must fire, and the others that did."""
    mark, style = ("●", "green") if outcome.caught else ("✗", "bold red")
    text = Text.assemble((f"{mark} {outcome.rule}", style))
    for rule in outcome.also:
        text.append(f"\n○ {rule}", style="dim")
    return text


def _place(outcome: Outcome) -> str:
    if not outcome.caught or outcome.location is None:
        return f"NOT CAUGHT: {outcome.reason}"
    return str(Place(**outcome.location))
