"""Command-line options that all benchmarks share, and what is done with the results they ask for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import machine
from bench.cells import Cell, markdown

WIDE = 160  # characters of a line where no terminal says how many it has


def parser(name: str, doc: str | None, batches: tuple[int, ...], seconds: float) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"python -m bench {name}", description=doc)
    default = ",".join(map(str, batches)) or "each row's own"
    made.add_argument("--batches", type=numbers, default=batches, help=f"default: {default}")
    made.add_argument("--seconds", type=float, default=seconds, help=f"of timing in each cell, default: {seconds:g}")
    made.add_argument("--threads", type=int, help="of torch, default: its own")
    made.add_argument("--json", metavar="OUT", help="write the results there")
    made.add_argument("--save", action="store_true", help="and into bench/results/, named after the date and the CPU")
    return made


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(","))


def begin(args: argparse.Namespace) -> Console:
    if args.threads:
        torch.set_num_threads(args.threads)
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    console.print(machine.header())
    return console


def finish(
    args: argparse.Namespace,
    console: Console,
    name: str,
    tables: Sequence[Table],
    cells: Sequence[Cell],
    neighbours: machine.Neighbours,
    **more: Any,
) -> int:
    """Prints the tables and what a reader must know of them, writes the results, and returns the exit status.

    Results are JSON, and the tables beside it in Markdown.
    """
    wrong = [f"{', '.join(cell.labels)}: {reason}" for cell in cells for reason in cell.refused.values()]
    for shown in tables:
        console.print(shown)
    for line in wrong:
        console.print(f"[red]{line}[/]")
    console.print(f"[yellow]{neighbours.said()}[/]")
    results = {"others": neighbours.share(), "cells": [cell.as_dict() for cell in cells], **more}
    for target in ([args.json] if args.json else []) + ([None] if args.save else []):
        path = machine.save(name, results, target)
        texts = [machine.header(), neighbours.said(), *map(markdown, tables), *wrong]
        path.with_suffix(".md").write_text("\n\n".join(texts))
        console.print(f"wrote {path} and {path.with_suffix('.md').name}")
    return 1 if wrong else 0
