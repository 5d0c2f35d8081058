"""`python -m fxopt`: what fxopt makes of a model, what this machine lacks, and kernels built ahead of serving.

Exit codes: 0 done; 1 the model, a compiler or the machine failed; 2 wrong usage; 3 a limit was missed that
`--fail-under` or `--max-error` set.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import fxopt
from fxopt.cli import build, cache, diff, doctor, export, report
from fxopt.cli.outcomes import Ended

USAGE, INTERRUPTED = 2, 130

_ABOUT = "Makes recommendation models with many embedding columns fast. In a program: model = fxopt.optimize(model)."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    options = parser().parse_args(argv)
    options.argv = sys.argv[1:] if argv is None else argv
    from fxopt.kernels.cache import BuildError
    from fxopt.report.model_file import ModelError, UsageError
    from fxopt.report.schema import NoReport

    try:
        options.command(options)
    except (UsageError, NoReport) as error:
        return _complain(error, USAGE)
    except (ModelError, BuildError) as error:
        return _complain(error, 1)
    except Ended as end:
        return _complain(end, end.code) if str(end) else end.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _complain(error: Exception, code: int) -> int:
    print(f"fxopt: {error}", file=sys.stderr)
    return code


def parser() -> argparse.ArgumentParser:
    """Of every command."""
    parsed = argparse.ArgumentParser("python -m fxopt", description=_ABOUT)
    parsed.add_argument("--version", action="version", version=f"fxopt {fxopt.__version__}")
    commands = parsed.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for each in (report, diff, export, build, doctor, cache):
        each.add(commands)
    return parsed
