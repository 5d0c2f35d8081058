"""One worker: checks the graphs of some seeds, one after the other, and says so in lines of text."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import sys
import warnings
from collections import Counter

import torch

from tests.fuzz import aliases, dense
from tests.fuzz.check import Failure, check
from tests.fuzz.driver import SPOILT
from tests.fuzz.placed import is_spoilt, on_cpu
from tests.fuzz.programs import Program
from tests.fuzz.shrink import shrink
from tests.properties import check as columns
from tests.properties.graphs import random_program

_SHRUNK_A_KIND = 1
PROGRAMS = {"dense": dense.program, "aliases": aliases.program}


def work(options: argparse.Namespace) -> None:
    quiet()
    if options.device != "cpu":
        torch.set_default_device(options.device)
    seen: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.graphs):
        print(f"at {seed}", flush=True)
        failure, text = (_program if options.kind in PROGRAMS else _columns)(seed, options, seen, kinds)
        spoilt = is_spoilt()
        if failure is not None:
            record = {"seed": seed, "what": failure.kind, "message": str(failure), "text": text}
            print(json.dumps(record), flush=True)
            if options.out:
                options.out.mkdir(parents=True, exist_ok=True)
                name = f"{options.kind}_{seed}_{failure.kind.replace(' ', '_')}.py"
                (options.out / name).write_text(f'"""{failure}"""\n\n{text}')
        if spoilt:
            print(json.dumps({"seen": seen}), flush=True)
            os._exit(SPOILT)  # nothing runs on this device any more
    print(json.dumps({"seen": seen}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # nothing is left to tidy up


def show(options: argparse.Namespace) -> None:
    """One graph of --kind dense or aliases, as it is and as small as it can be."""
    quiet()
    if options.device != "cpu":
        torch.set_default_device(options.device)
    program = PROGRAMS[options.kind](options.show, True if options.gradients else None)
    print(program.source())
    failure = check(program)
    print(failure or "the same")
    if failure is not None and not options.no_shrink:
        print(shrunk(program, failure))


def quiet() -> None:
    """One thread, no words about what fails, and no collections over what the imports have made."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch._subclasses.fake_tensor").disabled = True
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def shrunk(program: Program, failure: Failure) -> str:
    """The source of the smallest program that fails in the same way, and how it fails."""

    def wrong(candidate: Program) -> bool:
        try:
            found = check(candidate)
        except Exception:
            return False
        if failure.kind == "no error" and set(dense.unread_of(candidate.lines)) - set(candidate.outputs):
            return False  # a dead statement's error may be missing
        return found is not None and found.kind == failure.kind

    small = shrink(program, wrong)
    return f"# {check(small)}\n{small.reproducer()}"


def _program(
    seed: int, options: argparse.Namespace, seen: Counter[str], kinds: Counter[str]
) -> tuple[Failure | None, str]:
    try:
        program = PROGRAMS[options.kind](seed, True if options.gradients else None)
        failure = check(program, seen)
    except Exception as error:
        return Failure(f"harness {type(error).__name__}", str(error)), ""
    if failure is None:
        return None, ""
    kinds[failure.kind] += 1
    small = not options.no_shrink and not is_spoilt() and kinds[failure.kind] <= _SHRUNK_A_KIND
    return failure, shrunk(program, failure) if small else program.reproducer()


def _columns(
    seed: int, options: argparse.Namespace, seen: Counter[str], kinds: Counter[str]
) -> tuple[Failure | None, str]:
    torch.manual_seed(seed)
    program = on_cpu(random_program)(random.Random(seed).choice)
    program.grad |= options.gradients
    seen["graphs"] += seed  # the sizes depend on it
    try:
        columns.check(program, seen)
    except AssertionError as error:
        lines = str(error).splitlines()
        told = [line for line in lines[1:] if line.startswith(("Mismatched", "Greatest"))]
        return Failure("columns", "; ".join([*lines[:1], *told])), repr(program)
    except torch.AcceleratorError as error:
        return Failure("harness AcceleratorError", str(error).split("\n")[0]), repr(program)
    finally:
        seen["graphs"] -= seed
    return None, ""
