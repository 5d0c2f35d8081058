"""`python -m fxopt doctor`."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fxopt.cli.outcomes import FAILED, Ended

_MARKS = {"ok": ("ok", "green"), "advice": ("slow", "yellow"), "problem": ("broken", "red")}


def add(commands: Any) -> None:
    what = "what fxopt finds on this machine, and what to do about what it lacks"
    doctor = commands.add_parser("doctor", help=what, description=f"Shows {what}. {run.__doc__}")
    doctor.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Exits with 1 where something is broken; what only costs speed is no reason to."""
    from fxopt.doctor import checks

    found = checks()
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in found:
        text = Text(check.found)
        if check.todo:
            text.append(f"\n{check.todo}", "bold")
        table.add_row(Text(*_MARKS[check.state]), check.name, text)
    Console().print(table)
    if any(check.state == "problem" for check in found):
        raise Ended(FAILED)
