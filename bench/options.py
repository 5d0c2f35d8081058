"""Command-line options that all benchmarks share, and what is done with the results they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from bench import machine
from bench.cells import Cell


def parser(name: str, doc: str | None, batches: tuple[int, ...], seconds: float) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"python -m bench {name}", description=doc)
    default = ",".join(map(str, batches))
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
    console = Console()
    console.print(machine.header())
    return console


def finish(
    args: argparse.Namespace,
    console: Console,
    name: str,
    cells: Sequence[Cell],
    neighbours: machine.Neighbours,
    **more: Any,
) -> int:
    """Prints what a reader of the table must know, writes the results, and returns the exit status."""
    wrong = [f"{', '.join(cell.labels)}: {reason}" for cell in cells for reason in cell.refused.values()]
    for line in wrong:
        console.print(f"[red]{line}[/]")
    if neighbours.warning():
        console.print(f"[yellow]{neighbours.warning()}[/]")
    results = {"others": neighbours.share(), "cells": [cell.as_dict() for cell in cells], **more}
    targets = ([args.json] if args.json else []) + ([None] if args.save else [])
    for target in targets:
        console.print(f"wrote {machine.save(name, results, target)}")
    return 1 if wrong else 0
