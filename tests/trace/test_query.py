"""Each event is a view with the dictionary's columns, whatever is in the log, and a bad statement is one line."""

import csv
import json
from pathlib import Path
from typing import Any

import logs
import pytest

from kvproof.trace.events import COMMON, EVENTS
from kvproof.trace.reader.log import open_log
from kvproof.trace.reader.query import TYPES, BadQueryError, connect, select, sql_type, views, write_parquet

duckdb = pytest.importorskip("duckdb")


def ask(directory: Path, sql: str) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in select(connect(open_log(directory)), sql).rows]


def test_every_view_has_its_columns_and_types_even_without_a_line(tmp_path: Path) -> None:
    (tmp_path / logs.WORKER).write_text("")
    connection = connect(open_log(tmp_path))
    for event in EVENTS.values():
        name = event.name.replace(".", "_")
        described = {row[0]: row[1] for row in connection.execute(f"DESCRIBE {name}").fetchall()}
        declared = {field.name: sql_type(field) for field in (*COMMON, *event.fields)}
        assert described == {**declared, "utc": "TIMESTAMP", "file": "VARCHAR"}
        assert connection.execute(f"SELECT count(*) FROM {name}").fetchall() == [(0,)]
    assert connection.execute("SELECT * FROM events").fetchall() == []


def test_types_of_the_dictionary_are_known() -> None:
    unknown = {
        field.type
        for event in EVENTS.values()
        for field in (*COMMON, *event.fields)
        if field.type.removesuffix(" | null") not in TYPES
    }
    assert unknown == {"[[request index, group, first column, [block ids]]]"}  # stays JSON


def test_rows_are_what_was_written(tmp_path: Path) -> None:
    logs.violated(tmp_path)
    assert ask(tmp_path, "SELECT rule, step, slot, block FROM kv_violation") == [(logs.RULE, 9, 58, None)]
    given = ask(tmp_path, "SELECT step, unnest(requests), unnest(tokens) FROM kv_bind WHERE step = 2")
    assert given == [(2, "req-a", 8), (2, "req-b", 20)]
    assert ask(tmp_path, "SELECT kind, blocks FROM boundary WHERE kind = 'load_target'") == [("load_target", [[6, 7]])]
    ((blocks,),) = ask(tmp_path, "SELECT blocks FROM kv_bind WHERE step = 1")
    assert json.loads(blocks) == [[0, 0, 0, [1, 2]]]
    assert ask(tmp_path, "SELECT groups ->> '$[0].runs[0][1]' FROM kv_write WHERE step = 9") == [("62",)]


def test_the_view_of_all_lines(tmp_path: Path) -> None:
    log = open_log(logs.violated(tmp_path))
    counts = dict(ask(tmp_path, "SELECT event, count(*) FROM events GROUP BY event"))
    assert sum(counts.values()) == len(list(log.events()))
    assert ask(tmp_path, "SELECT line ->> 'found' FROM events WHERE event = 'kv.violation'") == [("slot 58",)]


def test_time_as_a_timestamp_and_the_host_in_the_file_name(tmp_path: Path) -> None:
    logs.violated(tmp_path)
    ((utc, file),) = ask(tmp_path, "SELECT utc, file FROM kv_violation")
    assert str(utc).startswith("2025-10-09 08:53:20.08")
    assert file == logs.WORKER


def test_broken_lines_do_not_break_a_query(tmp_path: Path) -> None:
    logs.violated(tmp_path)
    before = ask(tmp_path, "SELECT event, count(*) FROM events GROUP BY event ORDER BY event")
    with (tmp_path / logs.WORKER).open("ab") as file:
        file.write(b'nonsense\n\xff\xfe\n[1]\n7\n{}\n\n\x00\x00\n{"event":"kv.write","time":1,"groups":[{"gro')
    assert ask(tmp_path, "SELECT event, count(*) FROM events GROUP BY event ORDER BY event") == before
    for name in views():
        ask(tmp_path, f"SELECT * FROM {name}")


def test_segments_and_names_with_wildcards_and_quotes(tmp_path: Path) -> None:
    directory = logs.violated(tmp_path / "it's [1]*")
    (directory / logs.WORKER).rename(directory / logs.WORKER.replace(".jsonl", ".1.jsonl"))
    assert ask(directory, "SELECT count(*) FROM kv_write") == [(11,)]


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELEC 1", "Parser Error: syntax error"),
        ("SELECT nothing FROM kv_bind", "Binder Error"),
        ("SELECT * FROM nowhere", "Catalog Error"),
        ("SELECT * FROM 'https://localhost:1/x.parquet'", "httpfs"),
        ("SELECT CAST(role AS INTEGER) FROM kv_bind", "Conversion Error"),
    ],
)
def test_bad_sql_is_one_line_and_2(
    sql: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for extra in ([], ["--format", "csv"], ["--format", "parquet", "-o", tmp_path / "out.parquet"]):
        assert logs.command("query", logs.clean(tmp_path / "log"), sql, *extra) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("kvproof trace query: ")
        assert message in captured.err
        assert captured.err.count("\n") == 1


def test_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = logs.violated(tmp_path / "log")
    sql = "SELECT step, requests, blocks FROM kv_bind WHERE step <= 2 ORDER BY step"
    assert logs.command("query", log, sql, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)[0] == {"step": 1, "requests": ["req-a"], "blocks": [[0, 0, 0, [1, 2]]]}
    output = tmp_path / "out.csv"
    assert logs.command("query", log, sql, "--format", "csv", "-o", output) == 0
    with output.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [json.loads(row["requests"]) for row in rows] == [["req-a"], ["req-a", "req-b"]]
    output = tmp_path / "out.parquet"
    assert logs.command("query", log, sql, "--format", "parquet", "-o", output) == 0
    assert duckdb.sql(f"SELECT count(*) FROM '{output}'").fetchall() == [(2,)]
    assert logs.command("query", log, "SELECT 1 AS one WHERE false", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_table_and_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    log = logs.violated(tmp_path)
    assert logs.command("query", log, "SELECT step, total FROM kv_bind, range(9) ORDER BY step") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["step", "total"]
    assert "99 rows, 49 of them not shown" in out
    assert logs.command("query", log, "SELECT * FROM kv_violation") == 0
    out = capsys.readouterr().out
    assert "found     slot 58" in out
    assert max(map(len, out.splitlines())) <= 80


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert logs.command("query", logs.violated(tmp_path / "log"), "--parquet", tmp_path / "out") == 0
    assert "kv_write.parquet: 11 rows" in capsys.readouterr().out
    assert {path.stem for path in (tmp_path / "out").iterdir()} == {*views()} - {"events"}
    found = duckdb.sql(f"SELECT rule, utc FROM '{tmp_path / 'out' / 'kv_violation.parquet'}'").fetchall()
    assert found[0][0] == logs.RULE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either one SQL statement or --parquet DIR"),
        (["SELECT 1", "--parquet", "d"], "give either one SQL statement or --parquet DIR"),
        (["SELECT 1", "--format", "parquet"], "--format parquet: needs -o FILE"),
        (["SELECT 1", "-o", "f"], "-o f: needs --format json, csv or parquet"),
        (["--parquet", "d", "--format", "csv"], "--parquet DIR takes neither --format nor -o"),
    ],
)
def test_usage(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert logs.command("query", logs.clean(tmp_path), *arguments) == 2
    assert message in capsys.readouterr().err


def test_several_statements(tmp_path: Path) -> None:
    logs.clean(tmp_path)
    assert ask(tmp_path, "CREATE TABLE t AS SELECT 1 AS one; SELECT one FROM t") == [(1,)]


def test_parquet_takes_one_select(tmp_path: Path) -> None:
    connection = connect(open_log(logs.clean(tmp_path)))
    output = tmp_path / "out.parquet"
    write_parquet(connection, "SELECT 1 AS one; ", output)
    write_parquet(connection, "SELECT 1 AS one -- no more", output)
    assert duckdb.sql(f"SELECT * FROM '{output}'").fetchall() == [(1,)]
    with pytest.raises(BadQueryError, match="Parser Error"):
        write_parquet(connection, "CREATE TABLE t (one INT)", output)
