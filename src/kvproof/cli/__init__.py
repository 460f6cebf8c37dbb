"""The command line: one thin module per command."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from kvproof import __version__
from kvproof.cli import ablate, check, compare, doctor, faults, interrupts, layout, platforms, trace, zoo
from kvproof.findings.model import USAGE_EXIT_CODE

COMMANDS = (check, layout, ablate, platforms, faults, compare, trace, zoo, doctor)


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, as the commands do."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_EXIT_CODE, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``kvproof``; imports neither torch nor vLLM."""
    parser = _Parser(
        prog="kvproof", description="Proves that an LLM server's KV cache is right, byte by byte, without a device."
    )
    parser.add_argument("--version", action="version", version=f"kvproof {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point of the ``kvproof`` command; returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        with interrupts.taken():
            code: int = args.run(args)
    except KeyboardInterrupt:
        print("kvproof: interrupted", file=sys.stderr)
        return interrupts.INTERRUPTED
    except interrupts.EndedError as error:
        print(f"kvproof: {error}", file=sys.stderr)
        return error.exit_code
    return code
