"""``kvproof check``: proves byte by byte that a connector saves and restores the right bytes."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from kvproof import zoo
from kvproof.cli import engine_mode
from kvproof.cli.child import STARTED, ChildRun, run_child
from kvproof.engine import connectors
from kvproof.findings import terminal
from kvproof.findings.case import MODES, RUNNERS, Case, ConnectorSpec
from kvproof.findings.evidence import Evidence
from kvproof.findings.model import USAGE_EXIT_CODE, Finding, Report, Verdict
from kvproof.platforms import registry

STAND_IN = "kvproof-hostrt: "
"""How a stand-in library begins its last words (hostrt/hostrt.h)."""
REASON = 400
"""Characters of them that a verdict repeats."""
ALL = ("layout", "bulk", "layerwise", "async")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command to ``kvproof``'s parser."""
    parser = subparsers.add_parser(
        "check",
        help="prove byte by byte that a KV connector saves and restores the right bytes",
        description="Exit code: 0 PASS, 1 FAIL, 2 usage, 3 UNSUPPORTED, 4 PARTIALLY VERIFIED.",
    )
    add_case_arguments(parser)
    parser.add_argument(
        "--connector",
        default=connectors.DEFAULT_CONNECTOR,
        metavar="NAME",
        help="a connector vLLM registers, or package.module:Class (default: %(default)s)",
    )
    parser.add_argument(
        "--connector-config", metavar="JSON", help="kv_connector_extra_config; replaces the preset's"
    )
    parser.add_argument(
        "--mode", default="all", choices=(*MODES, "all"), help="all = layout, bulk, layerwise and async (default)"
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="longest prompt in tokens (default: 1024)")
    parser.add_argument("--evidence", metavar="DIR", help="keep case, layout, transcript, findings, log and reports")
    parser.add_argument("--json", action="store_true", help="print report.json instead of tables")
    parser.set_defaults(run=run)


def add_case_arguments(parser: argparse.ArgumentParser, model_optional: bool = False) -> None:
    """What ``check``, ``layout`` and ``ablate`` share."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?" if model_optional else None,
        help="a Hugging Face model directory or a bundled name (zoo list)",
    )  # fmt: skip
    add_platform_arguments(parser)
    parser.add_argument(
        "--cudagraph-mode", default="", metavar="MODE", help="vLLM's cudagraph mode (default: eager)"
    )
    parser.add_argument(
        "--max-model-len", type=int, metavar="N", help="tokens; decides how many blocks are staged"
    )
    parser.add_argument("--block-size", type=int, metavar="N", help="tokens per block (default: vLLM's)")
    parser.add_argument(
        "--engine-args", default="{}", metavar="JSON", help="arguments of vLLM's EngineArgs by name, inputs of the case"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="byte code, prompts, order of free blocks")


def add_platform_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the engine is staged; what ``faults`` shares with them."""
    parser.add_argument("--platform", default="cpu", choices=registry.NAMES, help="default: %(default)s")
    parser.add_argument("--runner", default="v1", choices=RUNNERS, help="vLLM's model runner (default: %(default)s)")
    parser.add_argument(
        "--cuda-capability", default="", metavar="X.Y", help="declared compute capability; cuda-sim needs it"
    )
    parser.add_argument(
        "--soc", default="", metavar="NAME", help="ascend910b, ascend910c or ascend950; ascend-sim needs it"
    )
    parser.add_argument(
        "--declare-soc", action="store_true", help="allow a --soc other than the one vllm-ascend was built for"
    )


def refuse(command: str, error: Exception | str) -> int:
    """One line on standard error, nothing written."""
    print(f"kvproof {command}: {error}", file=sys.stderr)
    return USAGE_EXIT_CODE


def positive(args: argparse.Namespace, *names: str) -> None:
    """ValueError for an option that was given and is not positive."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: limit at least 1")


def case_of(args: argparse.Namespace, workdir: Path, modes: tuple[str, ...], connector: ConnectorSpec | None) -> Case:
    """The frozen case of the arguments. ValueError, one line, for anything that cannot run."""
    positive(args, "max_model_len", "block_size")
    model_dir = zoo.resolve(args.model, workdir)
    limit = zoo.max_positions(model_dir)
    for name in ("tokens", "max_model_len"):
        if limit and (getattr(args, name, None) or 0) > limit:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}: limit {limit}, the model's positions")
    case = Case(
        model=args.model,
        model_dir=str(model_dir),
        connector=connector,
        platform=args.platform,
        runner=args.runner,
        modes=modes,
        tokens=getattr(args, "tokens", None) or 0,
        max_model_len=args.max_model_len or 0,
        block_size=args.block_size or 0,
        seed=args.seed,
        store=str(workdir / "store"),
        cuda_capability=args.cuda_capability,
        soc=args.soc,
        declare_soc=args.declare_soc,
        cudagraph_mode=args.cudagraph_mode,
        engine_args=json_object("--engine-args", args.engine_args),
    )
    host = registry.platform(case.platform)
    registry.require_taken(case)
    if "engine" in modes:
        engine_mode.require_taken(case, host)
    host.require(case)
    host.environment(case)  # builds what stands in for missing libraries: a compiler that is missing is said here
    return case


def run(args: argparse.Namespace) -> int:
    """Check, print, keep evidence; the verdict's exit code."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="kvproof-") as directory:
        workdir = Path(directory)
        (workdir / "store").mkdir()
        try:
            positive(args, "tokens")
            extra = _extra(args.connector_config)
            connector = connectors.parse(args.connector, str(workdir / "store"), extra)
            modes = ALL if args.mode == "all" else (args.mode,)
            case = case_of(args, workdir, modes, connector)
            evidence = Evidence(args.evidence) if args.evidence else None
        except ValueError as error:
            return refuse("check", error)
        try:
            report, records, log = _answer(case, workdir, Console(stderr=True), args.json)
        except ValueError as error:
            return refuse("check", error)
        if evidence is not None:
            keep(evidence, report, records, log)
    if args.json:
        print(json.dumps(report.to_json(), indent=1))
    else:
        terminal.render(report, console, None if evidence is None else evidence.path)
    return report.verdict.exit_code


def _answer(case: Case, workdir: Path, console: Console, quiet: bool) -> tuple[Report, list[dict[str, Any]], str]:
    """(report, transcript records, log) of a case. ValueError where the staged engine shows that it cannot be run."""
    if case.modes == ("engine",):
        with watching(case, console, quiet) as progress:
            report, log = engine_mode.run_engine(case, workdir, progress)
        return report, [], log
    child = run_watched(case, console, quiet)
    if child.result is None:
        return died(case, child), [], child.log
    if child.result.report is None:
        raise ValueError(child.result.usage)
    return child.result.report, child.result.records, child.log


@contextlib.contextmanager
def watching(case: Case, console: Console, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Progress on the screen: a live line on a terminal, plain lines elsewhere, nothing when quiet."""
    title = f"{case.model} · {case.connector.name if case.connector else 'no connector'} · {case.runner}"
    if quiet:
        yield lambda text: None
    elif not console.is_terminal:
        yield lambda text: console.print(f"  {title}: {text}", highlight=False, markup=False, soft_wrap=True)
    else:
        with console.status(title) as status:
            yield lambda text: status.update(f"{title}: {text}")


def run_watched(case: Case, console: Console, quiet: bool) -> ChildRun:
    """Run the child with its progress on the screen."""
    with watching(case, console, quiet) as progress:
        return run_child(case, progress)


def _extra(text: str | None) -> dict[str, Any] | None:
    return None if text is None else json_object("--connector-config", text)


def json_object(option: str, text: str) -> dict[str, Any]:
    """The JSON object an option was given. ValueError."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option}: not JSON ({error})") from None
    if not isinstance(found, dict):
        # The type of the user's JSON, not of an argument: refused input like any other.
        raise ValueError(f"{option}: expected a JSON object, got {type(found).__name__}")  # noqa: TRY004
    return found


def died(case: Case, child: ChildRun) -> Report:
    """Report of a child that ended without a result: FAIL once scenarios ran, else UNSUPPORTED."""
    last, how = child.watched.last, child.watched.how
    # A stand-in library that was asked for an entry nobody wrote says so and ends the process.
    said = [line.strip() for line in child.watched.lines if line.startswith(STAND_IN)]
    how += f", {said[-1][:REASON]}" if said else ""
    if not last.startswith(STARTED):
        return Report(case.to_json(), Verdict.UNSUPPORTED, f"{last}: the staging process ended with {how}")
    message = f"the engine process ended with {how} during {last}"
    finding = Finding(
        "lifecycle", "process_ended", message, last.removeprefix(STARTED),
        next_step="read the end of log.txt; an address outside of any tensor ends a process like this",
    )  # fmt: skip
    return Report(case.to_json(), Verdict.FAIL, message, findings=[finding])


def keep(evidence: Evidence, report: Report, records: list[dict[str, Any]], log: str) -> None:
    """Write the evidence directory, case first."""
    evidence.write_case(report.case)
    evidence.log_path.write_text(log, encoding="utf-8")
    if report.layout:
        evidence.write_layout(report.layout)
    for record in records:
        evidence.append_transcript(record)
    evidence.write_report(report)
