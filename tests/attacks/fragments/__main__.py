"""Runs random fragments: python -m tests.attacks.fragments --start 0 --count 1000, or --show SEED."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections import Counter

from tests.attacks.attack import CONFIGS
from tests.attacks.fragments.check import failure
from tests.attacks.fragments.program import fragment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--show", type=int)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    if options.show is not None:
        shown = fragment(options.show)
        print(shown.source, *shown.changes, sep="\n")
        print(failure(shown, CONFIGS["unchecked"]))
        return
    wrong: list[int] = []
    parts, every = Counter[str](), Counter[str]()
    for seed in range(options.start, options.start + options.count):
        made = fragment(seed)
        every.update(set(made.parts))
        if what := failure(made, CONFIGS["default" if seed % 8 == 0 else "unchecked"]):
            wrong.append(seed)
            parts.update(set(made.parts))
            print(seed, made.parts, what, flush=True)
    print(f"{len(wrong)} of {options.count} wrong: {wrong}")
    print(sorted(((n, every[p], p) for p, n in parts.items()), key=lambda t: -t[0] / t[1])[:30])


main()
