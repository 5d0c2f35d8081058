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
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import fxopt

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from fxopt.report.data import Report

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

_ABOUT = "Makes recommendation models with many embedding columns fast. In a program: model = fxopt.optimize(model)."
_REPORT = "what a model spends its time on, what fxopt changes, what not and why, and what that gains"
_EXPORT = "the optimized graph of a model as a torch.export program"
_MODE = "The model runs in eval mode and without gradients."
_FILE = """a Python file with build_model() and example_inputs(batch_size), which returns a tuple of the model's
positional arguments; factory: another function of the file that builds the model"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    options = _parser().parse_args(argv)
    from fxopt.export.errors import ExportError
    from fxopt.kernels.cache import BuildError
    from fxopt.report.model_file import ModelError, UsageError

    try:
        options.command(options)
    except UsageError as error:
        return _complain(error, USAGE)
    except (ModelError, BuildError, ExportError) as error:
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
    archs = "architectures of GPUs to compile for, as in sm_80,sm_90a (default: those of the GPUs here)"
    build.add_argument("--arch", type=_names, metavar="NAMES", help=archs)
    folder = "also write the CPU kernels to this folder as one library, libfxopt.so, for C++"
    build.add_argument("--bundle", type=Path, metavar="DIR", help=folder)
    build.set_defaults(command=_build)

    export = commands.add_parser("export", help=_EXPORT, description=f"Writes {_EXPORT}. {_MODE}")
    export.add_argument("file", metavar="FILE[:factory]", help=_FILE)
    export.add_argument("-o", "--output", required=True, type=Path, metavar="OUT", help="the .pt2 file to write")
    export.add_argument("--batch", type=int, default=64, metavar="SIZE", help="of the example inputs (default: 64)")
    package = "compile it with AOTInductor, for a process without Python"
    export.add_argument("--package", action="store_true", help=package)
    export.set_defaults(command=_export)
    return parser


def _batches(text: str) -> tuple[int, ...]:
    sizes = tuple(dict.fromkeys(int(part) if part.strip().isdecimal() else 0 for part in text.split(",")))
    if 0 in sizes:
        raise argparse.ArgumentTypeError(f"expected positive numbers with commas between, as in 1,256, found {text!r}")
    return sizes


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


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


def _export(options: argparse.Namespace) -> None:
    """Load, check in eager, export, write."""
    import torch

    from fxopt.export import export, package
    from fxopt.report.model_file import ModelFile

    with _progress(steps=3) as step:
        step(f"load {Path(options.file).name}")
        file = ModelFile(options.file)
        model, inputs = file.build(), file.inputs(options.batch)
        file.check(model, options.batch, inputs)
        step("capture, rewrite, verify, trace")
        program = export(model, inputs)
        step("compile" if options.package else "write")
        write = package if options.package else torch.export.save
        write(program, options.output)
    print(f"{options.output}: {_described(program)}")


def _described(program: ExportedProgram) -> str:
    targets = (str(node.target) for node in program.graph.nodes if node.op == "call_function")
    calls = [target for target in targets if target.startswith(("fxopt", "aten"))]
    return f"{len(calls)} operators, {sum(target.startswith('fxopt') for target in calls)} of them fxopt's"


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
    from fxopt.kernels import cuda_build
    from fxopt.kernels.build import build, find
    from fxopt.kernels.cache import BuildError
    from fxopt.kernels.libraries import BESIDE_CUDA, CUDA_LIBRARIES, LIBRARIES
    from fxopt.runtime.native import LIBRARY

    archs, why_none = _architectures(options.arch)
    cuda = [
        _Task(f"{each.name} for {arch}", partial(cuda_build.find, each, arch), partial(cuda_build.build, each, arch))
        for arch in archs
        for each in CUDA_LIBRARIES
    ]
    libraries = (*LIBRARIES, LIBRARY, *(BESIDE_CUDA if archs else ()))
    _compile([*cuda, *(_Task(each.name, partial(find, each), partial(build, each)) for each in libraries)], why_none)
    if options.bundle is not None:
        from fxopt.export import bundle

        try:
            bundle.write(options.bundle)
        except OSError as error:
            raise BuildError(f"--bundle {options.bundle}: cannot write there: {error.strerror}") from error
        print(f"{options.bundle / bundle.FRONT} opens the kernels beside it ({bundle.MANIFEST} lists them)")


def _architectures(asked: Sequence[str] | None) -> tuple[Sequence[str], str]:
    """What the CUDA kernels are compiled for, and where that is nothing, a line that says why."""
    import torch

    from fxopt.kernels import cuda_build
    from fxopt.report.model_file import UsageError

    if asked is not None:
        known = cuda_build.architectures()
        if wrong := [name for name in asked if name not in known]:
            raise UsageError(f"--arch: expected names with commas between, of {', '.join(known)}; found {wrong[0]!r}")
        return asked, ""
    if cuda_build.nvcc() is None:
        return (), f"CUDA kernels were not built: {cuda_build.NO_COMPILER}"
    here = {cuda_build.arch_on(device) for device in range(torch.cuda.device_count())}
    archs = sorted(filter(cuda_build.serves, here))
    return archs, "" if archs else "CUDA kernels were not built: no GPU for them is here (--arch names others)"


class _Task(NamedTuple):
    """One library to compile."""

    name: str
    find: Callable[[], Path | None]
    build: Callable[[], Path]


def _compile(tasks: Sequence[_Task], remark: str) -> None:
    """All at once, then a line for each. What fails keeps nothing else from being built."""
    from fxopt.kernels.cache import BuildError

    known, start = [task.find() is not None for task in tasks], time.perf_counter()
    with _progress(len(tasks)) as step, ThreadPoolExecutor(os.cpu_count()) as pool:
        step("compiling")
        builds = {pool.submit(task.build): task.name for task in tasks}
        for done in as_completed(builds):
            step(f"{builds[done]} is done")
    errors: dict[str, None] = {}
    for (done, name), before in zip(builds.items(), known, strict=True):
        try:
            print(f"{name} {'was built already' if before else 'built'}: {done.result()}")
        except BuildError as error:
            errors[str(error)] = None
    for line in filter(None, (remark, f"{time.perf_counter() - start:.1f} s")):
        print(line)
    if errors:
        first, *others = errors
        raise BuildError(first + (f"\n{len(others)} more could not be built" if others else ""))
