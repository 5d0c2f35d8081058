"""`python -m fxopt export`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxopt.cli.bar import bar
from fxopt.cli.outcomes import FAILED, Ended
from fxopt.cli.report import FILE

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_WHAT = "the optimized graph of a model as a torch.export program"


def add(commands: Any) -> None:
    about = f"Writes {_WHAT}. The model runs in eval mode and without gradients."
    export = commands.add_parser("export", help=_WHAT, description=about)
    export.add_argument("file", metavar="FILE[:factory]", help=FILE)
    export.add_argument("-o", "--output", required=True, type=Path, metavar="OUT", help="the .pt2 file to write")
    export.add_argument("--batch", type=int, default=64, metavar="SIZE", help="of the example inputs (default: 64)")
    package = "compile it with AOTInductor, for C++ and for fxopt.load"
    export.add_argument("--package", action="store_true", help=package)
    export.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """Load, check in eager, export, write."""
    import torch

    from fxopt.export import ExportError, export, package
    from fxopt.report.model_file import ModelFile

    with bar(steps=3) as step:
        step(f"load {Path(options.file).name}")
        file = ModelFile(options.file)
        model, inputs = file.build(), file.inputs(options.batch)
        file.check(model, options.batch, inputs)
        step("capture, rewrite, verify, trace")
        try:
            program = export(model, inputs)
        except ExportError as error:
            raise Ended(FAILED, str(error)) from error
        step("compile" if options.package else "write")
        write = package if options.package else torch.export.save
        write(program, options.output)
    print(f"{options.output}: {_described(program)}")


def _described(program: ExportedProgram) -> str:
    targets = (str(node.target) for node in program.graph.nodes if node.op == "call_function")
    calls = [target for target in targets if target.startswith(("fxopt", "aten"))]
    return f"{len(calls)} operators, {sum(target.startswith('fxopt') for target in calls)} of them fxopt's"
