"""``kvproof zoo``: the bundled models, and writing one as a model directory, with random weights or without any."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvproof import zoo
from kvproof.findings.model import USAGE_EXIT_CODE


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command and its four verbs to ``kvproof``'s parser."""
    parser = subparsers.add_parser("zoo", help="the bundled model configurations")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="{list,show,write,make}")
    listing = verbs.add_parser("list", help="name, family and cache of every bundled model")
    listing.add_argument("--json", action="store_true", help="print JSON instead of a table")
    show = verbs.add_parser("show", help="one bundled model as JSON")
    show.add_argument("name", metavar="NAME")
    write = verbs.add_parser("write", help="write one bundled model as a model directory")
    write.add_argument("name", metavar="NAME")
    write.add_argument("directory", metavar="DIR", help="a new or empty directory")
    make = verbs.add_parser("make", help="write a whole checkpoint: random weights and a tokenizer")
    make.add_argument("name", metavar="NAME", help="deepseek-v41-tiny or deepseek-v41-small")
    make.add_argument("directory", metavar="DIR", help="a new or empty directory")
    make.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    make.add_argument("--seed", type=int, default=0, metavar="N", help="another seed, other weights (default 0)")
    make.add_argument("--quantized", action="store_true", help="FP8 linear layers and MXFP4 experts, as released")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0, or 2 with one line on stderr where the name or the directory is refused."""
    try:
        if args.verb == "list":
            _list(args.json)
        elif args.verb == "show":
            print(json.dumps(zoo.describe(args.name).to_json(), indent=2))
        elif args.verb == "write":
            print(zoo.write(args.name, args.directory))
        else:
            from kvproof.zoo import deepseek_v41  # numpy, which no other verb needs

            options = {"dtype": args.dtype, "seed": args.seed, "quantized": args.quantized}
            print(deepseek_v41.make(args.name, args.directory, **options))
    except ValueError as error:
        print(f"kvproof zoo: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    return 0


def _list(as_json: bool) -> None:
    models = [zoo.describe(name) for name in zoo.names()]
    if as_json:
        rows = [{"name": model.name, "family": model.family, "summary": model.summary} for model in models]
        print(json.dumps(rows, indent=2))
        return
    table = Table(title="Bundled models", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("name", no_wrap=True)
    table.add_column("family", no_wrap=True)
    table.add_column("cache")
    for model in models:
        table.add_row(model.name, model.family, model.summary)
    Console().print(table)
