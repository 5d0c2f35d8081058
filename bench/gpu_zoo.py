"""Plain calls of third-party models on a GPU: eager, fxopt without captured graphs, and fxopt as it comes.

    python -m bench gpu_zoo [--zoo FILE] [--models NAME...] [--batch N...]

A row is one model at one batch size: microseconds of a call, many of them in a row, as a user makes them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import fxopt
from bench import zoo
from bench.gpu_timing import seconds_of, warm_up
from fxopt.runtime import dispatcher_of

MODELS = (
    "deepctr/DeepFM", "deepctr/DCN", "deepctr/DIN", "deepctr/MMOE", "deepctr/xDeepFM", "torchfm/FM", "torchfm/WD",
    "torchfm/NFM", "torchfm/AFI", "torchfm/xDeepFM",
)  # fmt: skip
MODES = ("eager", "fxopt, no graphs", "fxopt")


def on_gpu(values: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.cuda, values)


def rows(entry: Any, batches: list[int]) -> list[list[float]]:
    """Microseconds of each mode at each batch size.

    Raises:
        AssertionError: an answer is not eager's.
    """
    model = entry.make_model().cuda()
    for module in model.modules():
        if hasattr(module, "device"):  # deepctr-torch: where its layers put what they make
            module.device = "cuda"
    calls = {batch: on_gpu(entry.make_inputs(batch, 0, model)) for batch in batches}
    example = calls[batches[len(batches) // 2]]
    runs = [model, *(fxopt.optimize(model, example, fxopt.Config(cuda_graphs=mode)) for mode in (False, "auto"))]
    found = []
    for batch in batches:
        expected = entry.flatten(model(*calls[batch]))
        for run in runs[1:]:
            for _ in range(3):
                result = entry.flatten(run(*entry.fresh(calls[batch])))
                torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-3)
        inputs = calls[batch]
        found.append([1e6 * seconds_of(lambda: run(*entry.fresh(inputs))) for run in runs])  # noqa: B023 (called at once)
    for findings in dispatcher_of(runs[2]).findings:
        print(f"    {entry.name}: {findings.eager_reason or findings.graphs}")
    return found


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", type=Path, default=zoo.ZOO)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 256, 2048])
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    entries, table = zoo.load(options.zoo), []
    torch.set_grad_enabled(False)
    warm_up(lambda: torch.ones(1, device="cuda").add_(1))
    for name in options.models:
        try:
            times = rows(entries.get(name), options.batch)
        except Exception as error:  # a library that is not there, or a wrong answer: the others are still of use
            print(f"    {name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        table += [(name, batch, each) for batch, each in zip(options.batch, times, strict=True)]
    print(f"{'us a call':18} {'batch':>6}" + "".join(f"{mode:>18}" for mode in MODES))
    for name, batch, each in table:
        print(f"{name:18} {batch:6,}" + "".join(f"{us:10.1f} {each[0] / us:6.2f}x" for us in each))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
