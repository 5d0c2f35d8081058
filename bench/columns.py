"""RECom's models E and F: eager, torch.compile, the AOTInductor package and fxopt, whole and up to the concat."""

from __future__ import annotations

import argparse

from rich.console import Console
from torch import nn

from bench import options, peers
from bench.cells import Cell, run_cell, table
from bench.machine import Neighbours
from bench.models import ManyColumns
from bench.peers import Ready, Skipped, Subject
from bench.verify import Judge

PARTS = ("whole", "columns")
PEERS = ("fxopt", "compile", "aoti")
COMPILED_COLUMNS = 200  # torch.compile of 1000 columns takes minutes: 135 s, then 222 s for the next batch size
AOTI_BATCH = 1  # a package has static shapes and takes about 30 s at 100 columns
CAPTURED_AT = 64


def contenders(args: argparse.Namespace, subject: Subject, module: nn.Module) -> dict[str, Ready | Skipped]:
    """Everything that was asked for, ready or with the reason why not."""
    found: dict[str, Ready | Skipped] = {"eager": Ready(module, 0.0)}
    if "fxopt" in args.peers:
        found["fxopt"] = peers.with_fxopt(module, subject.inputs(CAPTURED_AT))
    too_many = Skipped(f"takes minutes at {subject.columns} columns (--force runs it, --limit gives it time)")
    compiles = subject.columns <= COMPILED_COLUMNS or args.force
    if "compile" in args.peers:
        found["compile"] = peers.with_compile(module, subject, args.batches, args.limit) if compiles else too_many
    if "aoti" not in args.peers:
        return found
    if AOTI_BATCH not in args.batches:
        return found | {"aoti": Skipped(f"measured at batch {AOTI_BATCH} only")}
    return found | (peers.with_aoti(subject, AOTI_BATCH, args.limit) if compiles else {"aoti": too_many})


def guarded(subject: Subject, model: ManyColumns) -> dict[str, Ready | Skipped]:
    """fxopt on the model, and on the model with redundant checks around every column."""
    twins = {"fxopt": model, "fxopt guarded": model.with_guards()}
    return {name: peers.with_fxopt(subject.of(twin), subject.inputs(CAPTURED_AT)) for name, twin in twins.items()}


def run_part(args: argparse.Namespace, console: Console, subject: Subject, model: ManyColumns) -> list[Cell]:
    module = subject.of(model)
    with console.status(f"{subject.part}: compiling"):
        found = guarded(subject, model) if args.guarded else contenders(args, subject, module)
    for name, it in found.items():
        if name != "eager":
            made = f"left out: {it.reason}" if isinstance(it, Skipped) else f"took {it.seconds:.1f} s to make"
            console.print(f"{subject.part}: {name} {made}{_operators(it)}")
    judge, cells = Judge(module), []
    for batch in args.batches:
        inputs = subject.inputs(batch)
        calls = {name: it.call for name, it in found.items() if isinstance(it, Ready) and it.runs(batch)}
        with console.status(f"{subject.part}: batch {batch}"):
            labels = (subject.part, str(batch))
            cells.append(run_cell(labels, calls, [inputs], [judge.expect(inputs)], args.seconds))
    return cells


def _operators(it: Ready | Skipped) -> str:
    """Calls of operators per forward, where fxopt counted them."""
    captures = getattr(getattr(it, "call", None), "_fxopt", None)
    if captures is None:
        return ""
    return f", {captures.findings[0].operators_before:,} operators into {captures.findings[0].operators_after}"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = options.parser("columns", __doc__, batches=(1, 64, 256, 1024), seconds=3.0)
    parser.add_argument("--model", choices=peers.MIXES, default="e")
    parser.add_argument("--columns", type=int, help="default: all, 1000 in E and 1200 in F")
    parser.add_argument("--guarded", action="store_true", help="fxopt alone, without and with redundant checks")
    parser.add_argument("--packed", action="store_true", help="one float and one id matrix, not a tensor a column")
    parser.add_argument("--peers", type=_peers, default=PEERS, help=f"default: {','.join(PEERS)}")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a compiler may take, default: 300")
    parser.add_argument("--build", action="store_true", help="also the first build of fxopt's kernel library")
    parser.add_argument("--force", action="store_true", help=f"run compilers beyond {COMPILED_COLUMNS} columns")
    args = parser.parse_args(argv)
    args.columns = args.columns or peers.MIXES[args.model].columns
    return args


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(PEERS):
        raise argparse.ArgumentTypeError(f"expected some of {','.join(PEERS)}, found {','.join(sorted(unknown))}")
    return names


def main(argv: list[str]) -> int:
    args = parse(argv)
    console = options.begin(args)
    if args.build:
        with console.status("building the kernel library"):
            built = peers.first_build(args.limit)
        console.print(f"first build: {built.reason if isinstance(built, Skipped) else f'{built:.1f} s'}")
    model = ManyColumns(peers.MIXES[args.model].scaled(args.columns))
    cells: list[Cell] = []
    neighbours = Neighbours()
    for part in PARTS:
        cells += run_part(args, console, Subject(args.model, args.columns, part, args.packed), model)
    shown = table(f"model {args.model.upper()}, {args.columns} columns", ("part", "batch"), cells)
    name = "guarded" if args.guarded else "columns"
    return options.finish(args, console, f"{name}_{args.model}{args.columns}", [shown], cells, neighbours)
