"""Puts load on eager, torch.compile and fxopt in a server, and prints latencies, the longest stall and memory growth.

    python examples/serve/load.py --clients 1 4 16 --seconds 5
    python examples/serve/load.py --only fxopt --minutes 30

Batches of requests have 1 to 64 rows. In the middle come batch sizes that nobody has seen, and new weights.
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
from rich.table import Table
from torch import Tensor, nn

import fxopt
from clients import Load, closed_loop, open_loop
from server import Request, Server

SIZES, NEW_SIZES = (1, 2, 5, 16, 33, 64), (3, 7, 50, 100, 129)
WARM_UP = 30  # calls


class DLRM(nn.Module):
    """`tables` embeddings of dim 16 and 13 dense features: their dot products, between two MLPs."""

    def __init__(self, tables: int, rows: int = 10_000, dim: int = 16) -> None:
        super().__init__()
        self.rows, fields = rows, tables + 1
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(dim + fields * (fields - 1) // 2, 128), nn.ReLU(), nn.Linear(128, 1))
        self.left, self.right = torch.tril_indices(fields, fields, -1).tolist()

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        fields = torch.stack([x, *(table(ids[:, i : i + 1]) for i, table in enumerate(self.tables))], 1)
        products = torch.bmm(fields, fields.transpose(1, 2))[:, self.left, self.right]
        return torch.sigmoid(self.top(torch.cat([x, products], 1)))

    def request(self, batch: int) -> Request:
        return torch.randn(batch, 13), torch.randint(0, self.rows, (batch, len(self.tables)))


CONTENDERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager": lambda model: model,
    "torch.compile": lambda model: torch.compile(model, dynamic=True),  # type: ignore[dict-item,return-value]
    "fxopt": fxopt.optimize,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="contenders")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 16], help="clients that wait for answers")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="of a soak: load, updates and memory, again and again"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the server; each calls the model")
    parser.add_argument("--tables", type=int, default=26, help="of the model")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in options.only:
        torch.manual_seed(0)
        model = DLRM(options.tables).eval()
        served = CONTENDERS[name](model)
        server = Server(served, options.threads)
        try:
            _warm(server, model)
            (_soak if options.minutes else _loads)(name, server, model, options)
        finally:
            server.close()


def _warm(server: Server, model: DLRM) -> None:
    for call in range(WARM_UP):
        server.ask(model.request(SIZES[call % len(SIZES)])).result()
    gc.collect()
    gc.freeze()  # what torch imports are half a million objects, and looking through them stalls all threads for 0.1 s


def _loads(name: str, server: Server, model: DLRM, options: argparse.Namespace) -> None:
    table = Table("load", "p50 ms", "p99 ms", "p99.9 ms", "longest ms", "requests/s", "rows/s", title=name)
    requests, before = [model.request(size) for size in SIZES], _memory()
    for clients in options.clients:
        load = closed_loop(server, requests, clients, options.seconds)
        table.add_row(f"{clients} clients", *_figures(load))
    rate = load.requests_per_second / 4
    table.add_row(f"{rate:.0f}/s at random", *_figures(open_loop(server, requests, rate, options.seconds)))
    unseen = [model.request(size) for size in NEW_SIZES]
    table.add_row("unseen batch sizes", *_figures(closed_loop(server, unseen, options.clients[-1], options.seconds)))
    _update(server, model)
    table.add_row("new weights", *_figures(closed_loop(server, requests, options.clients[-1], options.seconds)))
    console = Console()
    console.print(table)
    console.print(f"memory grew by {_memory() - before:.1f} MB")


def _soak(name: str, server: Server, model: DLRM, options: argparse.Namespace) -> None:
    over, before = time.perf_counter() + 60 * options.minutes, _memory()
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


def _figures(load: Load) -> list[str]:
    times = [*map(load.percentile, (0.5, 0.99, 0.999)), max(load.latencies)]
    return [*(f"{1e3 * t:.2f}" for t in times), f"{load.requests_per_second:.0f}", f"{load.rows_per_second:.0f}"]


def _memory() -> float:
    """Megabytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
