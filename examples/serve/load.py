"""Puts load on eager, torch.compile and fxopt in a server, and prints latencies, the longest stall and memory growth.

    python examples/serve/load.py --only eager fxopt --soak 0.5      # two minutes
    python examples/serve/load.py --only fxopt --soak 30

Batches of requests have 1 to 64 rows. In the middle come batch sizes that nobody has seen, and new weights. "x" is the
requests/s as a multiple of the first contender's. Requests at random moments are a quarter as many as the first one can
answer.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn

import fxopt
from clients import Load, closed_loop, open_loop
from server import Request, Server

SIZES, NEW_SIZES = (1, 2, 5, 16, 33, 64), (3, 7, 50, 100, 129)
WARM_UP = 30  # calls


class DLRM(nn.Module):
    """`tables` embeddings of dim 16 beside 13 dense features: columns in one wide row, between two MLPs."""

    def __init__(self, tables: int, rows: int = 10_000, dim: int = 16) -> None:
        super().__init__()
        self.rows = rows
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU())
        self.top = nn.Sequential(nn.Linear((tables + 1) * dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        columns = [table(ids[:, i : i + 1]) for i, table in enumerate(self.tables)]
        return torch.sigmoid(self.top(torch.cat([x, *columns], 1)))

    def request(self, batch: int) -> Request:
        return torch.randn(batch, 13), torch.randint(0, self.rows, (batch, len(self.tables)))


CONTENDERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager": lambda model: model,
    "fxopt": fxopt.optimize,
    "torch.compile": lambda model: torch.compile(model, dynamic=True),  # type: ignore[dict-item,return-value]
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="contenders")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 16], help="clients that wait for answers")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument("--soak", type=float, default=0.0, help="minutes of load, updates and memory, again and again")
    parser.add_argument("--threads", type=int, default=1, help="of the server; each calls the model")
    parser.add_argument("--tables", type=int, default=100, help="of the model")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    first: dict[str, float] = {}
    for name in options.only:
        torch.manual_seed(0)
        model = DLRM(options.tables).eval()
        served = CONTENDERS[name](model)
        server = Server(served, options.threads)
        try:
            _warm(server, model)
            _loads(name, server, model, options, first)
            _soak(name, server, model, options)
        finally:
            server.close()


def _warm(server: Server, model: DLRM) -> None:
    for call in range(WARM_UP):
        server.ask(model.request(SIZES[call % len(SIZES)])).result()
    gc.collect()
    gc.freeze()  # what torch imports are half a million objects, and looking through them stalls all threads for 0.1 s


def _loads(name: str, server: Server, model: DLRM, options: argparse.Namespace, first: dict[str, float]) -> None:
    """`first`: requests/s of the first contender, by load."""
    figures = "p50 ms", "p99 ms", "p99.9 ms", "max ms", "requests/s", "x", "rows/s"
    table = Table(Column("load", no_wrap=True), *figures, title=name)
    requests, before, most = [model.request(size) for size in SIZES], _memory(), options.clients[-1]

    def row(label: str, load: Load) -> None:
        times = [*map(load.percentile, (0.5, 0.99, 0.999)), max(load.latencies)]
        gain = load.requests_per_second / first.setdefault(label, load.requests_per_second)
        rates = f"{load.requests_per_second:.0f}", f"{gain:.1f}", f"{load.rows_per_second:.0f}"
        table.add_row(label, *(f"{1e3 * seconds:.2f}" for seconds in times), *rates)

    for clients in options.clients:
        row(f"{clients} clients", closed_loop(server, requests, clients, options.seconds))
    row("at random", open_loop(server, requests, first[f"{most} clients"] / 4, options.seconds))
    unseen = [model.request(size) for size in NEW_SIZES]
    row("unseen sizes", closed_loop(server, unseen, most, options.seconds))
    _update(server, model)
    row("new weights", closed_loop(server, requests, most, options.seconds))
    console = Console()
    console.print(table)
    console.print(f"memory grew by {_memory() - before:.1f} MB")


def _soak(name: str, server: Server, model: DLRM, options: argparse.Namespace) -> None:
    over, before = time.perf_counter() + 60 * options.soak, _memory()
    while time.perf_counter() < over:
        requests = [model.request(size) for size in torch.randint(1, 130, (20,)).tolist()]
        load = closed_loop(server, requests, options.clients[-1], options.seconds)
        _update(server, model)
        longest, p99 = 1e3 * max(load.latencies), 1e3 * load.percentile(0.99)
        grown = f"memory grew by {_memory() - before:.1f} MB"
        print(
            f"{name}: {load.rows_per_second:.0f} rows/s, p99 {p99:.2f} ms, longest {longest:.1f} ms, {grown}",
            flush=True,
        )


def _update(server: Server, model: DLRM) -> None:
    """New weights while the server runs; the next answers are the new model's."""
    new = copy.deepcopy(model.state_dict())
    for tensor in new.values():
        tensor.mul_(1.01)
    model.load_state_dict(new)
    request = model.request(9)
    with torch.inference_mode():
        torch.testing.assert_close(
            server.ask(request).result(), type(model).forward(model, *request), rtol=1e-4, atol=1e-5
        )


def _memory() -> float:
    """Megabytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
