"""`python -m fxopt cache`."""

from __future__ import annotations

import argparse
from typing import Any

from fxopt.cli.outcomes import FAILED, Ended


def add(commands: Any) -> None:
    what = "where compiled kernels are kept, and how to remove them"
    cache = commands.add_parser("cache", help=what, description=f"Shows {what}. {run.__doc__}")
    cache.add_argument("--clean", action="store_true", help="remove all kernels and timings; they are made again")
    cache.set_defaults(command=run)


def run(options: argparse.Namespace) -> None:
    """FXOPT_CACHE chooses the folder."""
    from fxopt.kernels.cache import cache_dir
    from fxopt.kernels.cache_entries import clean, entries
    from fxopt.report.units import count, size

    found = entries()
    print(f"{cache_dir()}: {count(len(found), 'entry', 'entries')}, {size(sum(each.bytes for each in found))}")
    if options.clean:
        try:
            print(f"removed {size(clean())}")
        except OSError as error:
            raise Ended(FAILED, f"cannot remove {error.filename}: {error.strerror}") from error
