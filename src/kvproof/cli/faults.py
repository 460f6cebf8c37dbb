"""``kvproof faults``: plants every fault of the catalogue in a working connector and shows which oracle caught it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvproof.cli import faults_trace
from kvproof.cli.check import add_platform_arguments, refuse
from kvproof.engine import connectors
from kvproof.faults.catalogue import CATALOGUE, KINDS, select
from kvproof.faults.model import Expected, Outcome
from kvproof.faults.run import Proof, prove
from kvproof.findings.case import Case
from kvproof.findings.text import printable
from kvproof.oracles.registry import ORACLES
from kvproof.platforms import registry

PROOF_FAILED = 1


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``kvproof``'s parser."""
    parser = subparsers.add_parser(
        "faults",
        help="prove that the check can fail: plant faults in a working connector and see each one caught",
        description="Exit code: 0 every applicable fault was caught at its exact place and the unfaulted connector is "
        "clean, 1 otherwise, 2 usage.",
    )
    parser.add_argument(
        "--connector", default=connectors.DEFAULT_CONNECTOR, choices=sorted(connectors.PROFILES), metavar="NAME",
        help="one of %(choices)s (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--trace", action="store_true",
        help="plant faults for the rules of the runtime guard instead, in running engines (docs/trace.md)",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", default=[], metavar="FAULT", help="plant these faults only")
    add_platform_arguments(parser)
    parser.add_argument("--list", action="store_true", help="print the catalogue and stop")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables (docs/json.md)")
    mine = ("connector", "platform", "runner", "cuda_capability", "soc", "declare_soc")
    parser.set_defaults(run=run, not_for_trace={name: parser.get_default(name) for name in mine})


def run(args: argparse.Namespace) -> int:
    """0 if the proof holds, 1 if not, 2 for refused input."""
    if args.trace:
        for name, default in args.not_for_trace.items():
            if getattr(args, name) != default:
                option = f"--{name.replace('_', '-')}"
                return refuse("faults", f"--trace: has engines of its own on vLLM's CPU build, does not take {option}")
        return faults_trace.run(args)
    console = Console()
    try:
        faults = select(args.only)
    except ValueError as error:
        return refuse("faults", error)
    if args.list:
        _list(console, args.json)
        return 0
    base = Case(
        "", "", platform=args.platform, runner=args.runner, cuda_capability=args.cuda_capability, soc=args.soc,
        declare_soc=args.declare_soc,
    )  # fmt: skip
    screen = Console(stderr=True)
    try:
        registry.require_taken(base)
        if args.json:
            proof = prove(args.connector, faults, lambda text: None, base)
        elif screen.is_terminal:
            with screen.status(args.connector) as status:
                proof = prove(args.connector, faults, lambda text: status.update(f"{args.connector}: {text}"), base)
        else:
            plain: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}
            proof = prove(args.connector, faults, lambda text: screen.print(f"  {text}", **plain), base)
    except ValueError as error:
        return refuse("faults", error)
    if args.json:
        print(json.dumps(proof.to_json(), indent=1))
    else:
        render(proof, console)
    return 0 if proof.holds else PROOF_FAILED


def _list(console: Console, as_json: bool) -> None:
    if as_json:
        print(json.dumps([
            {"name": f.name(), "summary": f.summary(), "oracle": f.oracle, "public_kind": list(f.stands_for)}
            for f in CATALOGUE.values()
        ], indent=1))  # fmt: skip
        return
    for kind, faults in KINDS.items():
        console.print(f"\n[bold]{kind}[/bold]")
        for fault in faults:
            head = Text.assemble("  ", (fault.name(), "cyan"), f"  {fault.oracle}  {' '.join(fault.stands_for)}")
            console.print(head)
            console.print(Padding(Text(fault.summary()), (0, 0, 0, 6)))


def render(proof: Proof, console: Console) -> None:
    """Faults against oracles, the places, what was missed, the controls, the verdict."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Fault × oracle", title_justify="left", title_style="bold")
    table.add_column("fault", overflow="fold", ratio=3)
    table.add_column("oracles", overflow="fold", ratio=2)
    table.add_column("wrong place, as the oracle named it", overflow="fold", ratio=4)
    for outcome in proof.faults:
        table.add_row(outcome.name, _marks(outcome), Text(printable(_place(outcome))))
    console.print(table)
    console.print("●  must report it, and did, at this place   ○  reported something too   ✗  must report it, did not")
    for control in proof.controls:
        word, style = ("clean", "green") if control.clean else ("NOT CLEAN", "bold red")
        console.print(Text.assemble(f"control {control.model} {control.when}: ", (word, style)))
        for message in control.findings:
            console.print(Text(f"  {printable(message)}"))
    judged = [f for f in proof.faults if f.applicable]
    caught = sum(f.caught for f in judged)
    word, style = ("PROVED", "bold green") if proof.holds else ("NOT PROVED", "bold red")
    rest = len(proof.faults) - len(judged)
    console.print(
        Text.assemble(
            (word, style),
            f"  {proof.connector} on {proof.platform}: {caught} of {len(judged)} planted faults caught "
            "at their exact place"
            + (f", {rest} not applicable" if rest else "") + f", {proof.seconds:.0f} s",
        )
    )  # fmt: skip


def _marks(outcome: Outcome) -> Text:
    """The oracle that must report the fault, and the others that did."""
    if not outcome.applicable:
        return Text("–", style="dim")
    mark, style = ("●", "green") if outcome.caught else ("✗", "bold red")
    text = Text.assemble((f"{mark} {outcome.oracle}", style))
    for oracle in ORACLES:
        if oracle != outcome.oracle and outcome.oracles.get(oracle):
            text.append(f"\n○ {oracle}", style="dim")
    return text


def _place(outcome: Outcome) -> str:
    if not outcome.applicable:
        return f"not applicable: {outcome.reason}"
    if not outcome.caught or outcome.location is None:
        return f"NOT CAUGHT: {outcome.reason}"
    return str(Expected.from_json(outcome.location))
