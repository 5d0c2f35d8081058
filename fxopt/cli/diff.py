"""`python -m fxopt diff`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console


def add(commands: Any) -> None:
    what = "what changed between two reports"
    diff = commands.add_parser("diff", help=what, description=f"Shows {what}.")
    diff.add_argument("old", metavar="OLD", help="a file written by report --json")
    diff.add_argument("new", metavar="NEW", help="another one")
    diff.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Shows two reports side by side: times, operators, rewrites that came or went."""
    from fxopt.report.diff import Diff
    from fxopt.report.schema import load

    Console().print(Diff(load(Path(options.old)), load(Path(options.new))))
