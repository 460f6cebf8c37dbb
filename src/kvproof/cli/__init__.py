"""The command line: one thin module per command."""

from __future__ import annotations

import argparse
import sys

from kvproof import __version__
from kvproof.cli import ablate, check, compare, doctor, faults, layout, platforms, trace, zoo

COMMANDS = (check, layout, ablate, platforms, faults, compare, trace, zoo, doctor)


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``kvproof``; imports neither torch nor vLLM."""
    parser = argparse.ArgumentParser(
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
        code: int = args.run(args)
    except KeyboardInterrupt:
        print("kvproof: interrupted", file=sys.stderr)
        return 130
    return code
