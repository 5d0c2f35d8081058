"""`python -m fxopt report`."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fxopt.cli.bar import bar
from fxopt.cli.outcomes import MISSED, Ended

if TYPE_CHECKING:
    from fxopt.report.data import Report

_WHAT = "what a model spends its time on, what fxopt changes, what not and why, and what that gains"
_MODE = "The model runs in eval mode and without gradients, unless --train is given."
FILE = """a Python file with build_model() and example_inputs(batch_size), which returns a tuple of the model's
positional arguments; factory: another function of the file that builds the model"""


def add(commands: Any) -> None:
    report = commands.add_parser("report", help=_WHAT, description=f"Shows {_WHAT}. {_MODE}")
    report.add_argument("file", metavar="FILE[:factory]", help=FILE)
    sizes = "batch sizes to measure (default: 1,256)"
    report.add_argument("--batch", type=_batches, default="1,256", metavar="SIZES", help=sizes)
    report.add_argument("--html", metavar="OUT", help="also write a page for a browser to this file")
    report.add_argument("--json", metavar="OUT", help="also write JSON to this file; with - only that, to stdout")
    report.add_argument("--train", action="store_true", help="measure training steps: forward and backward")
    others = "also time this in the same run: torch.compile"
    report.add_argument("--compare", action="append", default=[], metavar="NAME", help=others)
    report.add_argument("--device", metavar="NAME", help="put the model and its inputs there, as in cuda")
    least = "exit with 3 where a batch size gains less than this, as in 1.5"
    report.add_argument("--fail-under", type=float, metavar="SPEEDUP", help=least)
    most = "exit with 3 where an output differs from eager by more than this, as in 1e-5"
    report.add_argument("--max-error", type=float, metavar="ERROR", help=most)
    report.add_argument("--verbose", action="store_true", help="also name the passes that found nothing to do")
    report.set_defaults(command=run)


def _batches(text: str) -> tuple[int, ...]:
    sizes = tuple(dict.fromkeys(int(part) if part.strip().isdecimal() else 0 for part in text.split(",")))
    if 0 in sizes:
        raise argparse.ArgumentTypeError(f"expected positive numbers with commas between, as in 1,256, found {text!r}")
    return sizes


def run(options: argparse.Namespace) -> None:
    """Load, check in eager, capture and rewrite, measure; then show."""
    json, html = _target("--json", options.json), _target("--html", options.html)
    aside = contextlib.redirect_stdout(sys.stderr) if options.json == "-" else contextlib.nullcontext()
    with aside, bar(steps=4 + len(options.batch)) as step:
        result = _reported(options, step)
    if json is not None:
        json.write_text(result.to_json() + "\n")
    if html is not None:
        html.write_text(result.to_html())
    _show(result, options)
    if missed := _missed(result, options):
        raise Ended(MISSED, "\n".join(missed))


def _show(result: Report, options: argparse.Namespace) -> None:
    from fxopt.report.text import Verbose, plain

    shown = Verbose(result) if options.verbose else result
    if options.json == "-":
        print(result.to_json())
    elif sys.stdout.isatty():
        Console().print(shown)
    else:
        print(plain(shown))


def _reported(options: argparse.Namespace, step: Callable[[str], None]) -> Report:
    import torch

    from fxopt.optimize import optimize
    from fxopt.report import report
    from fxopt.report.contenders import OTHERS
    from fxopt.report.model_file import ModelFile, UsageError

    if unknown := [name for name in options.compare if name not in OTHERS]:
        raise UsageError(f"--compare {unknown[0]}: expected one of {', '.join(OTHERS)}")
    device = _device(options.device)
    step(f"load {Path(options.file).name}")
    file = ModelFile(options.file)
    model = file.build(device).train(options.train)
    inputs = {batch: file.inputs(batch, device) for batch in options.batch}
    step("run eager")
    for batch, args in inputs.items():
        file.check(model, batch, args)
    step("capture, rewrite, verify")
    optimized = optimize(model)
    with torch.set_grad_enabled(options.train):
        optimized(*inputs[max(options.batch)])  # verified on the most rows
    command = shlex.join(["python", "-m", "fxopt", *options.argv])
    return report(optimized, inputs, step, training=options.train, compare=options.compare, command=command)


def _device(name: str | None) -> Any:
    """What --device names; None: the model and its inputs stay where they are."""
    import torch

    from fxopt.report.model_file import UsageError

    if name is None:
        return None
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {name}: {str(error).splitlines()[0]}") from error
    return device


def _target(option: str, name: str | None) -> Path | None:
    """Where a file goes, tried out before the work and not after it."""
    from fxopt.report.model_file import UsageError

    if name is None or (option, name) == ("--json", "-"):
        return None
    path = Path(name)
    try:
        path.touch()
    except OSError as error:
        raise UsageError(f"{option} {name}: cannot write there: {error.strerror}") from error
    return path


def _missed(result: Report, options: argparse.Namespace) -> Sequence[str]:
    """The limits of the options that a batch size misses; what was not measured misses them too."""
    lines = []
    for m in (m for found in result.signatures for m in found.measurements):
        said = m.distrust or m.problem or "not measured"
        if options.fail_under is not None and (m.speedup is None or m.speedup < options.fail_under):
            found = said if m.speedup is None else f"{m.speedup:.2f}x"
            lines.append(f"--fail-under {options.fail_under:g}: batch {m.batch:,}: {found}")
        if options.max_error is not None and (m.max_error is None or not m.max_error <= options.max_error):
            found = said if m.max_error is None else f"{m.max_error:.2g}"
            lines.append(f"--max-error {options.max_error:g}: batch {m.batch:,}: {found}")
    return lines
