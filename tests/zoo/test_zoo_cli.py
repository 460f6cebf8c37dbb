"""``kvproof zoo``: output and exit codes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from kvproof import zoo
from kvproof.cli import zoo as command


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["zoo", *words])
    return int(args.run(args))


def test_list_names_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    table = capsys.readouterr().out
    assert all(name in table for name in zoo.names())


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == zoo.names()
    assert all(set(row) == {"name", "family", "summary"} for row in rows)


def test_show_prints_the_whole_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show", "tiny-gemma3") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["config"] == zoo.describe("tiny-gemma3").config


def test_write_prints_the_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "model"
    assert run("write", "tiny-qwen3", str(target)) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert (target / "config.json").is_file()


@pytest.mark.parametrize("words", [("show", "tiny-qwen"), ("write", "tiny-qwen", "x"), ("write", "tiny-qwen3", ".")])
def test_bad_input_is_one_line_and_exit_code_2(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").touch()
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]


def test_a_missing_verb_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as caught:
        run()
    assert caught.value.code == 2
