"""Embedding columns on a GPU: eager, torch.compile and fxopt, each as called and as a captured graph."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fxopt
from bench.gpu_cases import Bags, Case, dlrm, long_bags, micro24, model_e, with_fbgemm
from bench.gpu_timing import Gpu, measure_gpu, replayed, seconds_cold, seconds_of
from bench.machine import RESULTS
from fxopt.kernels.columns.cuda import use
from fxopt.kernels.columns.cuda.tuning import tune

BATCHES = (1, 256, 2048)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    yield from model_e(args.columns, args.batches)
    if args.compile:
        yield from model_e(100, (256,))
    yield dlrm(2048, torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        for zipf in (False, True):
            yield micro24(dtype, zipf)
    for batch in (1, 8):
        yield long_bags(batch)


with_graphs: dict[int, Any] = {}


def contenders(case: Case, compile: bool, made: dict[int, Any]) -> dict[str, Callable[[], Any]]:
    """Everything that runs the case; `made` keeps optimized modules from one batch size to the next."""
    module, inputs = case.module, case.inputs
    if id(module) not in made:
        start = time.perf_counter()
        made[id(module)] = module, fxopt.optimize(module, inputs), time.perf_counter() - start
        with_graphs[id(module)] = fxopt.optimize(module, inputs, fxopt.Config(cuda_graphs=True))
    optimized, graphs = made[id(module)][1], with_graphs[id(module)]
    found = {"eager": lambda: module(*inputs), "fxopt": lambda: optimized(*inputs)}
    found["fxopt cuda_graphs"] = lambda: graphs(*inputs)
    if compile and case.compiles:
        torch._dynamo.reset()
        compiled = torch.compile(module)
        found["compile"] = lambda: compiled(*inputs)
    if isinstance(module, Bags):
        with contextlib.suppress(ImportError):
            found["FBGEMM TBE"] = with_fbgemm(module, *inputs)
    return found


def run_case(case: Case, gpu: Gpu, compile: bool, tunes: bool, made: dict[int, Any]) -> dict[str, Any]:
    """Checks every contender against eager, then times it, called and replayed."""
    calls = contenders(case, compile, made)
    expected = case.module(*case.inputs).clone()
    floor = gpu.floor(case.bytes_read + case.weight_bytes, case.bytes_written, case.flops)
    result: dict[str, Any] = {
        "case": case.name,
        "batch": case.batch,
        "floor_us": floor * 1e6,
        "times_us": {},
        "error": {},
    }
    for name, call in calls.items():
        result["error"][name] = error_of(call(), expected)
        result["times_us"][name] = seconds_of(call) * 1e6
        if name.endswith("graphs"):
            continue  # replays by itself; a capture of it runs the plain way
        replay = replayed(call)
        replay()
        torch.cuda.synchronize()
        result["error"][f"{name} + graph"] = error_of(replay(), expected)
        result["times_us"][f"{name} + graph"] = seconds_of(replay) * 1e6
        result["error"][f"{name} + graph, cold L2"] = result["error"][f"{name} + graph"]
        result["times_us"][f"{name} + graph, cold L2"] = seconds_cold(replay) * 1e6
    if tunes:
        result["builds_us"] = tune(calls["fxopt"])
        use()
    return result


def error_of(found: Any, expected: torch.Tensor) -> float:
    """The largest difference to eager, over the largest value."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def table(results: list[dict[str, Any]]) -> Table:
    shown = Table(title="microseconds a call; floor: bytes read and written at full bandwidth, or TF32 operations")
    for heading in ("case", "batch", "contender"):
        shown.add_column(heading)
    for heading in ("us", "floor us", "of floor", "eager / this", "error"):
        shown.add_column(heading, justify="right")
    for r in results:
        for name, us in r["times_us"].items():
            numbers = (us, r["floor_us"], 100 * r["floor_us"] / us, r["times_us"]["eager"] / us)
            texts = (f"{numbers[0]:.1f}", f"{numbers[1]:.1f}", f"{numbers[2]:.0f}%", f"{numbers[3]:.2f}")
            shown.add_row(r["case"], str(r["batch"]), name, *texts, f"{r['error'][name]:.1e}")
        shown.add_section()
    return shown


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench gpu", description=__doc__)
    parser.add_argument("--columns", type=int, default=1000)
    parser.add_argument("--batches", type=lambda s: tuple(map(int, s.split(","))), default=BATCHES)
    parser.add_argument("--compile", action="store_true", help="also torch.compile, of 100 columns (minutes)")
    parser.add_argument("--tune", action="store_true", help="also each build of the columns that tune() tries")
    parser.add_argument("--json", type=Path, help="where to write the results, default: bench/results/")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("python -m bench gpu: no CUDA device here", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = True
    console = Console(width=130)
    with torch.no_grad():
        gpu = measure_gpu()
        console.print(gpu)
        made: dict[int, Any] = {}
        results = [run_case(case, gpu, args.compile, args.tune, made) for case in cases(args)]
    console.print(table(results))
    for r in results:
        builds = ", ".join(f"{name} {us:.1f}" for name, us in r.get("builds_us", {}).items())
        if builds:
            console.print(f"{r['case']}, batch {r['batch']}: {builds} us")
    if importlib.util.find_spec("fbgemm_gpu") is None:
        console.print("no row of FBGEMM's TBE: fbgemm_gpu is not installed here")
    for module, _, seconds in made.values():
        console.print(f"{type(module).__name__}: fxopt.optimize took {seconds:.1f} s")
    target = args.json or RESULTS / f"gpu_{date.today()}_{gpu.name.replace(' ', '-')}.json"
    told = {"gpu": gpu.as_dict(), "date": datetime.now().isoformat(timespec="seconds"), "results": results}
    target.write_text(json.dumps(told, indent=1) + "\n")
    console.print(f"wrote {target}")
    return 0
