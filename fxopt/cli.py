"""`python -m fxopt`: report what fxopt makes of a model, and build kernels ahead of serving.

Exit codes: 0 done; 1 the model, or a compiler, failed; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import fxopt

if TYPE_CHECKING:
    from fxopt.report.data import Report

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

_ABOUT = "Makes recommendation models with many embedding columns fast. In a program: model = fxopt.optimize(model)."
_REPORT = "what a model spends its time on, what fxopt changes, what not and why, and what that gains"
_MODE = "The model runs in eval mode and without gradients."
_FILE = """a Python file with build_model() and example_inputs(batch_size), which returns a tuple of the model's
positional arguments; factory: another function of the file that builds the model"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    options = _parser().parse_args(argv)
    from fxopt.kernels.build import BuildError
    from fxopt.report.model_file import ModelError, UsageError

    try:
        options.command(options)
    except UsageError as error:
        return _complain(error, USAGE)
    except (ModelError, BuildError) as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return DONE


def _complain(error: Exception, code: int) -> int:
    print(f"fxopt: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m fxopt", description=_ABOUT)
    parser.add_argument("--version", action="version", version=f"fxopt {fxopt.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    report = commands.add_parser("report", help=_REPORT, description=f"Shows {_REPORT}. {_MODE}")
    report.add_argument("file", metavar="FILE[:factory]", help=_FILE)
    sizes = "batch sizes to measure (default: 1,256)"
    report.add_argument("--batch", type=_batches, default="1,256", metavar="SIZES", help=sizes)
    report.add_argument("--json", metavar="OUT", help="also write JSON to this file; with - only that, to stdout")
    report.set_defaults(command=_report)

    build = commands.add_parser("build", help="compile every kernel ahead of serving", description=_build.__doc__)
    build.set_defaults(command=_build)
    return parser


def _batches(text: str) -> tuple[int, ...]:
    sizes = tuple(dict.fromkeys(int(part) if part.strip().isdecimal() else 0 for part in text.split(",")))
    if 0 in sizes:
        raise argparse.ArgumentTypeError(f"expected positive numbers with commas between, as in 1,256, found {text!r}")
    return sizes


def _report(options: argparse.Namespace) -> None:
    """Load, check in eager, capture and rewrite, measure; then show."""
    out = _json_target(options.json)
    aside = contextlib.redirect_stdout(sys.stderr) if options.json == "-" else contextlib.nullcontext()
    with aside, _progress(steps=3 + len(options.batch)) as step:
        result = _reported(options.file, options.batch, step)
    if out is not None:
        out.write_text(result.to_json() + "\n")
    if options.json == "-":
        print(result.to_json())
    elif sys.stdout.isatty():
        Console().print(result)
    else:
        print(result)


def _reported(target: str, batches: Sequence[int], step: Callable[[str], None]) -> Report:
    import torch

    from fxopt.optimize import optimize
    from fxopt.report import report
    from fxopt.report.model_file import ModelFile

    step(f"load {Path(target).name}")
    file = ModelFile(target)
    model = file.build()
    inputs = {batch: file.inputs(batch) for batch in batches}
    step("run eager")
    for batch, args in inputs.items():
        file.check(model, batch, args)
    step("capture, rewrite, verify")
    optimized = optimize(model)
    with torch.no_grad():
        optimized(*inputs[max(batches)])  # verified on the most rows
    return report(optimized, inputs, progress=step)


def _json_target(name: str | None) -> Path | None:
    """Where the JSON goes, tried out before the work and not after it."""
    from fxopt.report.model_file import UsageError

    if name is None or name == "-":
        return None
    path = Path(name)
    try:
        path.touch()
    except OSError as error:
        raise UsageError(f"--json {name}: cannot write there: {error.strerror}") from error
    return path


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr, only on a terminal; the function it gives begins the next step."""
    console = Console(stderr=True)
    text, steps_done = TextColumn("{task.description}"), MofNCompleteColumn()
    columns = (SpinnerColumn(), text, BarColumn(20), steps_done, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, done = bar.add_task("start", total=steps), itertools.count()
        yield lambda description: bar.update(task, description=description, completed=next(done))


def _build(options: argparse.Namespace) -> None:
    """Compiles every kernel now, so that no server does it at its first call. FXOPT_CACHE chooses the folder."""
    from fxopt.kernels.build import build, find
    from fxopt.kernels.libraries import LIBRARIES
    from fxopt.runtime.native import LIBRARY

    libraries = (*LIBRARIES, LIBRARY)
    known, start = [find(library) is not None for library in libraries], time.perf_counter()
    with Console(stderr=True).status("compiling"), ThreadPoolExecutor(os.cpu_count()) as pool:
        paths = list(pool.map(build, libraries))
    for library, path, before in zip(libraries, paths, known, strict=True):
        print(f"{library.name} {'was built already' if before else 'built'}: {path}")
    print(f"{time.perf_counter() - start:.1f} s")
