"""``kvproof trace``: reads the logs of the guard in a running vLLM."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvproof.cli.check import refuse
from kvproof.findings.text import counted, printable
from kvproof.trace.reader import dictionary, explain, explain_view, query, summary, timeline, watch
from kvproof.trace.reader.log import NoLogError, open_log

VIOLATED = 1

QUERY_HELP = """\
views: {views}
each has the columns of its event (kvproof trace dictionary), `utc` (time as a timestamp) and `file`.

examples:
  kvproof trace query LOGS "SELECT rule, count(*) AS n, min(step) FROM kv_violation GROUP BY rule ORDER BY n DESC"
  kvproof trace query LOGS "SELECT step, unnest(requests) AS request, unnest(tokens) AS tokens FROM kv_bind"
  kvproof trace query LOGS "SELECT utc, free FROM kv_alloc ORDER BY utc" --format csv -o free.csv
  kvproof trace query LOGS --parquet DIR
"""

SubParsers = argparse._SubParsersAction


def add_parser(subparsers: SubParsers[argparse.ArgumentParser]) -> None:
    """Add the command to ``kvproof``'s parser."""
    parser = subparsers.add_parser(
        "trace",
        help="read the logs of the guard in a running vLLM: summary, explanation, timeline, SQL, live view",
        description="PATH is a log directory (additional_config.kv_trace.path) or one file of it.",
    )
    commands = parser.add_subparsers(dest="trace_command", required=True, metavar="COMMAND")
    _add_summary(commands)
    _add_explain(commands)
    _add_timeline(commands)
    _add_query(commands)
    _add_dictionary(commands)
    _add_watch(commands)


def _add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", type=Path, help="log directory, or one file of it")


def _add_summary(commands: SubParsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "summary",
        help="one page: processes, steps, rules judged and skipped, violations, errors, what the log has lost",
        description="Exit code: 0 no violation and no error in the log, 1 there are, 2 usage or no log.",
    )
    _add_path(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run_summary)


def _add_explain(commands: SubParsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "explain",
        help="one violation in full: rule, step, block table, who else had the block, what to do next",
        description="Exit code: 0 explained, 2 usage, no log, or no such violation.",
    )
    _add_path(parser)
    parser.add_argument("--number", type=int, metavar="N", help="the N-th violation in time, from 1 (default: 1)")
    parser.add_argument("--rule", metavar="NAME", help="count only the violations of this rule")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run_explain)


def _add_timeline(commands: SubParsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "timeline",
        help="Chrome trace events for ui.perfetto.dev: requests, steps, transfers, free blocks, violations",
        description="Exit code: 0 written, 2 usage or no log.",
    )
    _add_path(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, required=True, help="JSON file; compressed when it ends in .gz"
    )
    parser.set_defaults(run=run_timeline)


def _add_query(commands: SubParsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "query",
        help="SQL over the log with DuckDB, one view per event; exports Parquet",
        description="Exit code: 0 answered, 2 usage, no log, or SQL that cannot be run.",
        epilog=QUERY_HELP.format(views=", ".join(query.views())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_path(parser)
    parser.add_argument("sql", metavar="SQL", nargs="?", help="one statement")
    parser.add_argument("--format", choices=query.FORMATS, default="table", help="default: %(default)s")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="where to write; needed by parquet")
    parser.add_argument("--parquet", metavar="DIR", type=Path, help="write every view as DIR/<view>.parquet")
    parser.set_defaults(run=run_query)


def _add_dictionary(commands: SubParsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "dictionary", help="every event, field and rule of the log, as Markdown (docs/trace-dictionary.md)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    parser.set_defaults(run=run_dictionary)


def _add_watch(commands: SubParsers[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "watch",
        help="live view of a running log; Ctrl-C ends it",
        description="Exit code: 0 no violation was seen, 1 there were, 2 usage or no log.",
    )
    _add_path(parser)
    parser.add_argument("--once", action="store_true", help="print one picture and stop")
    parser.set_defaults(run=run_watch)


def run_summary(args: argparse.Namespace) -> int:
    """0 clean, 1 violations or errors, 2 no log."""
    try:
        found = summary.summarize(open_log(args.path))
        if not found.events:
            raise NoLogError(f"{args.path}: no event of kv_trace in it")
    except (NoLogError, OSError) as error:
        return refuse("trace summary", _line(error))
    if args.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        summary.render(found, Console())
    return found.exit_code


def run_explain(args: argparse.Namespace) -> int:
    """0 explained, 2 no such violation or no log."""
    try:
        found = explain.explain(open_log(args.path), args.number, args.rule)
    except (NoLogError, explain.NotFoundError, OSError) as error:
        return refuse("trace explain", _line(error))
    if args.json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        explain_view.render(found, Console())
    return 0


def run_timeline(args: argparse.Namespace) -> int:
    """0 written, 2 no log or no place to write."""
    try:
        counts = timeline.write(open_log(args.path), args.output)
    except (NoLogError, OSError) as error:
        return refuse("trace timeline", _line(error))
    parts = ", ".join(
        counted(getattr(counts, f"{noun}s"), noun) for noun in ("request", "step", "transfer", "marker")
    )
    print(f"{args.output}: {parts}")
    print("open it at https://ui.perfetto.dev (it is read in your browser, not uploaded)")
    return 0


def run_query(args: argparse.Namespace) -> int:
    """0 answered, 2 for refused input."""
    if (args.sql is None) == (args.parquet is None):
        return refuse("trace query", "give either one SQL statement or --parquet DIR")
    if args.parquet is not None and (args.output is not None or args.format != "table"):
        return refuse("trace query", "--parquet DIR takes neither --format nor -o: it writes Parquet files into DIR")
    if args.format == "parquet" and args.output is None:
        return refuse("trace query", "--format parquet: needs -o FILE")
    if args.format == "table" and args.output is not None:
        return refuse("trace query", f"-o {args.output}: needs --format json, csv or parquet")
    try:
        connection = query.connect(open_log(args.path))
        if args.parquet is not None:
            for view, count in query.export(connection, args.parquet).items():
                print(f"{args.parquet / view}.parquet: {counted(count, 'row')}")
        elif args.format == "parquet":
            query.write_parquet(connection, args.sql, args.output)
        elif args.format == "table":
            query.render(query.select(connection, args.sql), Console())
        else:
            rows = query.select(connection, args.sql)
            write = query.write_json if args.format == "json" else query.write_csv
            if args.output is None:
                write(rows, sys.stdout)
            else:
                with args.output.open("w", encoding="utf-8", newline="") as file:
                    write(rows, file)
    except BrokenPipeError:
        sys.stderr.close()  # the reader has seen enough
        return 0
    except (NoLogError, query.BadQueryError, OSError) as error:
        return refuse("trace query", _line(error))
    except ImportError as error:
        return refuse("trace query", f"{error}; pip install duckdb")
    return 0


def run_dictionary(args: argparse.Namespace) -> int:
    """Always 0."""
    print(json.dumps(dictionary.to_json(), indent=1) if args.json else dictionary.markdown().rstrip("\n"))
    return 0


def run_watch(args: argparse.Namespace) -> int:
    """0 no violation seen, 1 violations, 2 no log."""
    console = Console()
    try:
        code = watch.watch(args.path, console, args.once)
    except (NoLogError, OSError) as error:
        return refuse("trace watch", _line(error))
    if not args.once:
        console.print(Text(f"left at {args.path}", style="dim"))
    return code


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return printable(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    return printable(str(error))
