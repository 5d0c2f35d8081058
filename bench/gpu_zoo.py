"""Third-party models on a GPU, as a user calls them and as captured graphs, and how many kernels they launch.

    python -m bench gpu_zoo [--zoo FILE] [--models NAME...] [--batch N...] [--compiled] [--json FILE]

A row is one model at one batch size: microseconds of a call, many of them in a row. "graph" is the replay of a graph of
the whole call, without copies around it. Answers are compared with eager's first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

import fxopt
from bench import zoo
from bench.gpu_timing import replayed, seconds_of, warm_up
from bench.machine import RESULTS
from fxopt.runtime import dispatcher_of

MODELS = (
    "deepctr/DeepFM", "deepctr/DCN", "deepctr/DIN", "deepctr/MMOE", "deepctr/xDeepFM", "deepctr/FiBiNET",
    "deepctr/AutoInt", "torchfm/FM", "torchfm/WD", "torchfm/NFM", "torchfm/AFI", "torchfm/xDeepFM",
)  # fmt: skip
TURNS = 2  # each: all calls, one after another
TIMES = ("eager", "eager graph", "torch.compile", "fxopt", "fxopt graph")
Call = Callable[[], Any]


def on_gpu(values: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.cuda, values)


def rows(entry: Any, batches: list[int], compiled: bool) -> Iterator[dict[str, Any]]:
    """Of one model: microseconds by TIMES, without those that there are none of, and kernels.

    Raises:
        AssertionError: an answer is not eager's.
    """
    model = entry.make_model().cuda()
    for module in model.modules():
        if hasattr(module, "device"):  # deepctr-torch: where its layers put what they make
            module.device = "cuda"
    example = on_gpu(entry.make_inputs(batches[len(batches) // 2], 0, model))
    fast, uncaptured = (fxopt.optimize(model, example, fxopt.Config(cuda_graphs=mode)) for mode in ("auto", False))
    for batch in batches:
        inputs = on_gpu(entry.make_inputs(batch, 0, model))
        runs = {"eager": model, "fxopt": fast, "fxopt graph": uncaptured}
        calls = {name: _checked(entry, run, model, inputs) for name, run in runs.items()}
        if compiled and (call := _compiled(entry, model, inputs)):
            calls["torch.compile"] = call
        kernels = {"eager": kernels_of(calls["eager"]), "fxopt": kernels_of(calls["fxopt graph"])}
        graphs = {"eager graph": _replayed(calls["eager"]), "fxopt graph": _replayed(calls["fxopt graph"])}
        timed = {name: call for name, call in {**calls, **graphs}.items() if call}
        us = dict.fromkeys(timed, float("inf"))
        for name in [*timed] * TURNS:
            us[name] = min(us[name], 1e6 * seconds_of(timed[name]))
        torch._dynamo.reset()  # else what is compiled for one size is compiled again, more generally, for the next
        yield {"model": entry.name, "batch": batch, "us": us, "kernels": kernels}
    for findings in dispatcher_of(fast).findings:
        print(f"    {entry.name}: {findings.eager_reason or findings.graphs}")


def tell(what: str, error: Exception) -> None:
    print(f"    {what}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)


def _compiled(entry: Any, model: Any, inputs: Any) -> Call | None:
    """None, and why, where torch.compile raises."""
    try:
        return _checked(entry, torch.compile(model, mode="reduce-overhead", dynamic=False), model, inputs)
    except Exception as error:
        tell(f"{entry.name}: torch.compile", error)
        return None


def _checked(entry: Any, run: Any, model: Any, inputs: Any) -> Call:
    """A call with fresh inputs, which the first ones have shown to give eager's answer."""
    expected = entry.flatten(model(*inputs))
    for _ in range(3):
        torch.testing.assert_close(entry.flatten(run(*entry.fresh(inputs))), expected, rtol=2e-2, atol=2e-3)
    return lambda: run(*entry.fresh(inputs))


def _replayed(call: Call) -> Call | None:
    """None where the call cannot be captured: it waits for the device."""
    try:
        return replayed(call)
    except RuntimeError:
        torch.cuda.synchronize()
        return None


def kernels_of(call: Call) -> int:
    """How many kernels a call launches, without copies and fills of memory."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    events = [event for event in profiled.events() or () if event.device_type == DeviceType.CUDA]
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in events)


def shown(found: list[dict[str, Any]]) -> Table:
    table = Table(title=f"microseconds on {torch.cuda.get_device_name()}, and kernels a call")
    for heading in ("model", "batch", *TIMES, "x eager", "x its graph", "x compiled", "kernels", "fxopt's"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in found:
        us = row["us"]
        cells = [f"{us[name]:.1f}" if name in us else "" for name in TIMES]
        cells += [f"{us[name] / us['fxopt']:.2f}" if name in us else "" for name in TIMES[:3]]
        table.add_row(row["model"], f"{row['batch']:,}", *cells, *(str(count) for count in row["kernels"].values()))
    return table


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", type=Path, default=zoo.ZOO)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 256, 2048])
    parser.add_argument("--compiled", action="store_true", help="also torch.compile, which takes 1 to 250 s a model")
    parser.add_argument("--json", type=Path, help="where to write the results, default: bench/results/")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options, found = parse(arguments), list[dict[str, Any]]()
    entries = zoo.load(options.zoo)
    torch.set_grad_enabled(False)
    warm_up(lambda: torch.ones(1, device="cuda").add_(1))
    machine = torch.cuda.get_device_name()
    target = options.json or RESULTS / f"gpu_zoo_{date.today()}_{machine.replace(' ', '-')}.json"
    for name in options.models:
        try:
            found += rows(entries.get(name), options.batch, options.compiled)
        except Exception as error:  # a library that is not there, or a wrong answer: the others are still of use
            tell(name, error)
        about = {"machine": machine, "torch": torch.__version__, "date": str(date.today()), "rows": found}
        target.write_text(json.dumps(about, indent=1) + "\n")
    Console(width=150).print(shown(found))
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
