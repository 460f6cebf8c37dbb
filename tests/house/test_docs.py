"""Commands and links in the documentation lead somewhere."""

import argparse
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvproof.cli import build_parser

ROOT = Path(__file__).parents[2]
DOCS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
SHELL = ("", "sh", "bash", "shell", "console")
SYNOPSIS = re.compile(r"[\[…]|\.\.\.")
"""Marks a line that describes a command rather than being one."""


def code_lines(text: str) -> Iterator[str]:
    """The lines of the shell blocks, without prompts."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language in SHELL:
            yield from (line.removeprefix("$ ") for line in block.splitlines())


def inline_code(text: str) -> list[str]:
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`((?:make|kvproof) [^`]+)`", prose)


def words(line: str) -> list[str]:
    """The first command of a line, up to a comment, pipe or redirection, without assignments before it."""
    split = shlex.shlex(line, posix=True, punctuation_chars="|&;>")
    split.whitespace_split = True
    first = itertools.takewhile(lambda word: not word or word[0] not in "|&;>", split)
    command = list(itertools.dropwhile(lambda word: re.match(r"\w+=", word), first))
    return [Path(command[0]).name, *command[1:]] if command else []


def commands(path: Path, program: str) -> Iterator[tuple[str, list[str]]]:
    """(line, arguments) of each call of a program that a document shows."""
    text = path.read_text()
    for line in (*code_lines(text), *inline_code(text)):
        if program in line and (found := words(line)) and found[0] == program:
            yield line, found[1:]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def subcommands() -> set[str]:
    actions = build_parser()._actions
    (subparsers,) = (action for action in actions if isinstance(action, argparse._SubParsersAction))
    return set(subparsers.choices)


def parses(arguments: list[str]) -> bool:
    try:
        build_parser().parse_args(arguments)
    except SystemExit as stop:  # --help and --version leave with 0
        return stop.code in (0, None)
    return True


def test_readme_starts_with_what_ci_runs() -> None:
    shown = {tuple(arguments) for _, arguments in commands(ROOT / "README.md", "make")}
    run = re.findall(r"^make ([\w.-]+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert run == ["demo", "acceptance-trace", "test-cuda", "test-cuda-0.32", "test-ascend", "test"]
    assert {(target,) for target in run} <= shown


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_make_targets_exist(path: Path) -> None:
    for line, arguments in commands(path, "make"):
        named = {word for word in arguments if "=" not in word and not word.startswith("-")}
        assert named <= make_targets(), line


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_kvproof_commands_parse(path: Path) -> None:
    for line, arguments in commands(path, "kvproof"):
        assert arguments[0].startswith("-") or arguments[0] in subcommands(), line
        if len(arguments) > 1 and not SYNOPSIS.search(line):
            assert parses(arguments), line


def test_readme_shows_the_main_command() -> None:
    assert any(arguments[0] == "check" for _, arguments in commands(ROOT / "README.md", "kvproof"))


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_relative_links_exist(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target
