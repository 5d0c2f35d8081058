"""Models on a GPU: eager, fxopt, fbgemm_gpu and torch.compile, each as called and as a captured graph.

First the machine, then a table. Kernels come prebuilt out of FXOPT_CACHE (`python -m fxopt build`), or nvcc makes them.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils._pytree import tree_leaves, tree_map

from bench import options
from bench.gpu_cases import BATCHES, Case, cases
from bench.gpu_peers import Peer, Unavailable, peers
from bench.gpu_rows import Measured, Row, remarks, table, write
from bench.gpu_timing import Gpu, measure_gpu, replayed, seconds_cold, seconds_of
from bench.machine import RESULTS
from fxopt.kernels.columns.cuda import use
from fxopt.kernels.columns.cuda.tuning import tune

WRONG = 0.02  # of the largest value; bf16's steps are 0.004 of it


def measure(
    every_case: Iterator[Case], everybody: Sequence[Peer], gpu: Gpu, deadline: float, rows: list[Row]
) -> Iterator[tuple[Row, Case]]:
    """Adds rows, and yields each when its quick contenders are done, then again with each that takes long to make,
    the quickest first. deadline: of time.perf_counter(); what would take longer is left out."""
    done = []
    for case in every_case:
        floor = gpu.floor(case.bytes_read, case.bytes_written, case.flops, case.dtype != torch.float32)
        row = Row(case.name, case.batch, floor * 1e6)
        rows.append(row)
        fill(row, case, [peer for peer in everybody if peer.seconds is None and peer.runs(case)], deadline)
        done.append((row, case))
        yield row, case
    slow = [(peer.seconds(case), peer, row, case) for peer in everybody if peer.seconds for row, case in done]
    for _, peer, row, case in sorted(slow, key=itemgetter(0)):
        fill(row, case, [peer], deadline)
        if peer.name in row.measured:
            yield row, case


def fill(row: Row, case: Case, contenders: Sequence[Peer], deadline: float) -> None:
    """Compares each contender with eager, then times it. One that fails leaves the others their row."""
    expected = tree_map(torch.clone, case.module(*case.inputs))
    for peer in contenders:
        try:
            row.measured[peer.name] = _measure(peer, case, expected, deadline)
        except Unavailable as error:
            row.left_out[peer.name] = str(error)
        except Exception as error:
            row.left_out[peer.name] = f"{type(error).__name__}: {str(error).strip()}".split("\n", 1)[0]


def _measure(peer: Peer, case: Case, expected: Any, deadline: float) -> Measured:
    seconds = peer.seconds(case) if peer.seconds else 0.0
    if math.isinf(seconds):
        raise Unavailable("not asked, it takes minutes")
    start = time.perf_counter()
    if start + seconds > deadline:
        raise Unavailable("no time was left")
    call = peer.make(case)
    found = call()
    torch.cuda.synchronize()
    made = time.perf_counter() - start
    error = error_of(found, expected)
    if peer.replays:
        return Measured(seconds_of(call) * 1e6, None, None, error, made)
    called = seconds_of(call)
    replay = replayed(call)
    error = max(error, error_of(replay(), expected))
    return Measured(called * 1e6, seconds_of(replay) * 1e6, seconds_cold(replay) * 1e6, error, made)


def error_of(found: Any, expected: Any) -> float:
    """The largest difference, over the largest value of its tensor.

    Raises:
        Unavailable: it is more than rounding.
    """
    pairs = [(a.double(), b.double()) for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True)]
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    if not error <= WRONG:
        raise Unavailable(f"differs from eager by {error:.1e} of the largest value")
    return error


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench gpu", description=__doc__)
    parser.add_argument("--columns", type=int, default=1000)
    parser.add_argument("--batches", type=options.numbers, default=BATCHES, help="of model E, default: 1,256,2048")
    parser.add_argument("--minutes", type=float, default=9.0, help="what would take longer is left out, default: 9")
    parser.add_argument("--tune", action="store_true", help="also each build of the columns that tune() tries")
    parser.add_argument("--json", type=Path, help="where to write the results as they come, default: bench/results/")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    begun, args = time.perf_counter(), parse(argv)
    if not torch.cuda.is_available():
        print("python -m bench gpu: no CUDA device here", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = True
    console = Console(width=140)
    everybody, rows = peers(), list[Row]()
    with torch.no_grad():
        gpu = measure_gpu()
        console.print(str(gpu), soft_wrap=True)
        target = args.json or RESULTS / f"gpu_{date.today()}_{gpu.name.replace(' ', '-')}.json"
        deadline = begun + 60 * args.minutes
        for row, case in measure(cases(args.columns, args.batches), everybody, gpu, deadline, rows):
            console.print(f"{time.perf_counter() - begun:4.0f} s: {row}: {', '.join(row.measured)}", soft_wrap=True)
            if args.tune and not row.builds_us and "fxopt" in row.measured:
                row.builds_us.update(tune(next(peer for peer in everybody if peer.name == "fxopt").make(case)))
                use()
            write(target, gpu, rows)
    console.print(table(rows))
    for line in remarks(rows):
        console.print(line, soft_wrap=True)
    console.print(f"wrote {target} after {time.perf_counter() - begun:.0f} s")
    return 0
