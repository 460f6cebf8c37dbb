"""SQL over the log: one DuckDB view per event, typed as the dictionary says, over the files as they lie there.

Nothing is imported or copied, nothing is downloaded: JSON and Parquet are built into DuckDB.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kvproof.findings.text import counted, printable
from kvproof.trace.events import COMMON, EVENTS, Field
from kvproof.trace.reader.dictionary import view_name
from kvproof.trace.reader.log import Log

if TYPE_CHECKING:
    import duckdb
    from rich.console import Console

TYPES = {
    "string": "VARCHAR",
    "number": "DOUBLE",
    "integer": "BIGINT",
    "boolean": "BOOLEAN",
    "[string]": "VARCHAR[]",
    "[integer]": "BIGINT[]",
    "[[integer]]": "BIGINT[][]",
    "[[from, to]]": "BIGINT[][]",
    "object": "JSON",
    "[object]": "JSON",
}
"""SQL type of each type of the dictionary; anything else stays JSON."""

FORMATS = ("table", "json", "csv", "parquet")
SHOWN = 50
"""Rows of a table on the screen; the other formats have all."""
LONGEST_LINE = 1 << 28
"""Bytes of the longest line DuckDB takes: kv.bind can hold whole prompts."""
CELL = 200
"""Characters of a cell on the screen."""
BATCH = 2048


class BadQueryError(ValueError):
    """The SQL cannot be run; one line."""


@dataclass
class Rows:
    """A result: its columns, their SQL types, and the rows as they come."""

    columns: list[str]
    types: list[str]
    rows: Iterator[Sequence[Any]]


def connect(log: Log) -> duckdb.DuckDBPyConnection:
    """A connection with the views of ``log``. Each view exists, also when the log has no such event.

    BadQueryError, one line, when DuckDB cannot read one of the files.
    """
    import duckdb

    try:
        return _connect(log)
    except (duckdb.Error, RuntimeError) as error:
        raise BadQueryError(one_line(error)) from None


def _connect(log: Log) -> duckdb.DuckDBPyConnection:
    import duckdb

    connection = duckdb.connect(
        ":memory:", config={"autoinstall_known_extensions": "false", "autoload_known_extensions": "false"}
    )
    files = ", ".join(_quoted(_literal(str(path))) for path in log.files())
    for event in EVENTS.values():
        fields = (*COMMON, *event.fields)
        columns = ", ".join(_name(field.name) for field in fields)
        connection.execute(
            f"CREATE VIEW {view_name(event.name)} AS SELECT {columns}, {_UTC}, {_FILE} "
            f"FROM {_reader(files, fields)} WHERE event = {_quoted(event.name)}"
        )
    common = ", ".join(f"TRY_CAST(json ->> '{f.name}' AS {sql_type(f)}) AS {_name(f.name)}" for f in COMMON)
    connection.execute(
        f"CREATE VIEW events AS SELECT {', '.join(_name(f.name) for f in COMMON)}, {_UTC}, {_FILE}, line FROM "
        f"(SELECT {common}, json AS line, filename FROM read_ndjson_objects([{files}], ignore_errors = true, "
        f"filename = true, maximum_object_size = {LONGEST_LINE})) WHERE event IS NOT NULL AND time IS NOT NULL"
    )
    return connection


def views() -> tuple[str, ...]:
    """Names of all views."""
    return ("events", *(view_name(name) for name in EVENTS))


def sql_type(field: Field) -> str:
    """SQL type of a field; a ``| null`` makes no difference."""
    return TYPES.get(field.type.removesuffix(" | null"), "JSON")


def select(connection: duckdb.DuckDBPyConnection, sql: str) -> Rows:
    """Run ``sql``. BadQueryError, one line, when DuckDB refuses it."""
    import duckdb

    try:
        cursor = connection.execute(sql)
        description = (cursor.description or []) if cursor is not None else []
    except (duckdb.Error, RuntimeError) as error:
        raise BadQueryError(one_line(error)) from None
    if cursor is None:
        raise BadQueryError("no statement in the SQL")

    def rows() -> Iterator[Sequence[Any]]:
        while True:
            try:
                batch = cursor.fetchmany(BATCH)
            except (duckdb.Error, RuntimeError) as error:
                raise BadQueryError(one_line(error)) from None
            if not batch:
                return
            yield from batch

    return Rows([str(column[0]) for column in description], [str(column[1]) for column in description], rows())


def write_parquet(connection: duckdb.DuckDBPyConnection, sql: str, output: Path) -> None:
    """Run one SELECT into a Parquet file."""
    import duckdb

    # The statement ends on a line of its own: it may end in a comment.
    body = sql.rstrip().removesuffix(";")
    try:
        connection.execute(f"COPY ({body}\n) TO {_quoted(str(output))} (FORMAT parquet, COMPRESSION zstd)").fetchall()
    except (duckdb.Error, RuntimeError) as error:
        raise BadQueryError(one_line(error)) from None


def export(connection: duckdb.DuckDBPyConnection, directory: Path) -> dict[str, int]:
    """Each event's view as ``directory``/<view>.parquet; rows per view."""
    directory.mkdir(parents=True, exist_ok=True)
    counts = {}
    for view in views():
        if view == "events":
            continue  # the same lines again, untyped
        target = directory / f"{view}.parquet"
        write_parquet(connection, f"SELECT * FROM {view}", target)
        count = f"SELECT count(*) FROM read_parquet({_quoted(_literal(str(target)))})"
        ((counts[view],),) = connection.execute(count).fetchall()
    return counts


def write_json(rows: Rows, out: TextIO) -> None:
    """A JSON array, one row a line; columns of type JSON are nested, not quoted."""
    nested = [kind.upper() == "JSON" for kind in rows.types]
    out.write("[")
    for number, row in enumerate(rows.rows):
        values = [
            json.loads(v) if is_json and isinstance(v, str) else v for v, is_json in zip(row, nested, strict=True)
        ]
        out.write(",\n" if number else "\n")
        out.write(json.dumps(dict(zip(rows.columns, values, strict=True)), default=str))
    out.write("\n]\n")


def write_csv(rows: Rows, out: TextIO) -> None:
    """CSV with a header; lists as JSON."""
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(rows.columns)
    for row in rows.rows:
        writer.writerow([json.dumps(v, default=str) if isinstance(v, list | dict) else v for v in row])


def render(rows: Rows, console: Console) -> None:
    """A table where the columns fit, else one record under the other."""
    from rich.text import Text

    from kvproof.trace.reader.summary import table_of

    shown: list[list[str]] = []
    more = 0
    for row in rows.rows:
        if len(shown) < SHOWN:
            shown.append([_shown(value) for value in row])
        else:
            more += 1
    if rows.columns and _fits(rows.columns, shown, console.width):
        right = tuple(n for n, kind in zip(rows.columns, rows.types, strict=True) if _is_number(kind))
        table = table_of("", *map(printable, rows.columns), right=right)
        table.title = None
        for line in shown:
            table.add_row(*map(Text, line))
        console.print(table)
    else:
        for number, line in enumerate(shown, start=1):
            console.print(_record(number, rows.columns, line))
    total = len(shown) + more
    note = f"{counted(total, 'row')}" + (f", {more:,} of them not shown (--format csv has all)" if more else "")
    console.print(Text(note, style="dim"))


def _record(number: int, columns: Sequence[str], line: Sequence[str]) -> Any:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(Text(f"row {number}", style="bold"), "")
    for column, value in zip(columns, line, strict=True):
        grid.add_row(printable(column), Text(value))
    return grid


def _fits(columns: Sequence[str], shown: Iterable[Sequence[str]], width: int) -> bool:
    """Whether a table is readable: short cells whole, long ones with room to fold."""
    needed = [min(len(name), 16) for name in columns]
    for line in shown:
        needed = [max(n, min(len(value), 16)) for n, value in zip(needed, line, strict=True)]
    return sum(needed) + len(needed) <= width


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        text = f"{value:,.6f}".rstrip("0").rstrip(".") if abs(value) < 1e15 else repr(value)
        return text.replace(",", "")
    if isinstance(value, list | dict):
        value = json.dumps(value, default=str, separators=(",", ":"))
    text = printable(str(value))
    return text if len(text) <= CELL else f"{text[: CELL - 2]} …"


def _is_number(kind: str) -> bool:
    return bool(re.fullmatch(r"(U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|DOUBLE|FLOAT|DECIMAL.*|NUMBER)", kind.upper()))


def one_line(error: Exception) -> str:
    """DuckDB's message without its drawing of the place."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith(("LINE ", "^"))]
    return printable(" ".join(kept)) or type(error).__name__


_UTC = "make_timestamp(CAST(time * 1000000 AS BIGINT)) AS utc"
_FILE = "parse_filename(filename) AS file"


def _reader(files: str, fields: Sequence[Field]) -> str:
    columns = ", ".join(f"{_quoted(field.name)}: {_quoted(sql_type(field))}" for field in fields)
    return (
        f"read_json([{files}], format = 'newline_delimited', ignore_errors = true, filename = true, "
        f"maximum_object_size = {LONGEST_LINE}, columns = {{{columns}}})"
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _name(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def _literal(path: str) -> str:
    """A path with the wildcards of DuckDB's glob disarmed."""
    return re.sub(r"([*?\[])", r"[\1]", path)
