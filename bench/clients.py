"""Calls a second by one client and by many at once, each in a thread of its own."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from rich.table import Table

ROUNDS = 3


def served_clients(
    contenders: Mapping[str, Callable[..., Any]], fresh: Callable[[tuple], tuple], args: tuple, seconds: float
) -> dict[str, dict[int, float]]:
    """By contender and number of clients (one, and twice the cores): the median of rounds taken in turns.

    Args:
        fresh: makes the arguments of each call from `args`.
        seconds: of all rounds together.
    """
    several = (1, 2 * (os.cpu_count() or 1))
    lap = seconds / ROUNDS / len(several) / max(1, len(contenders))
    found: dict[str, dict[int, list[float]]] = {name: {clients: [] for clients in several} for name in contenders}
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            for clients in several:
                found[name][clients].append(_rate(call, lambda: fresh(args), clients, lap))
    return {
        name: {clients: statistics.median(rates) for clients, rates in by_clients.items()}
        for name, by_clients in found.items()
    }


def table(served: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Table:
    """served: by model, contender and number of clients."""
    shown = Table(title="calls a second", caption="at the smallest batch size; every client is a thread")
    for heading in ("model", "contender"):
        shown.add_column(heading, no_wrap=True)
    several = sorted({clients for rates in served.values() for by_clients in rates.values() for clients in by_clients})
    for clients in several:
        shown.add_column(f"{clients} client{'s' * (clients > 1)}", justify="right")
    for model, rates in served.items():
        for name, by_clients in rates.items():
            shown.add_row(model, name, *(f"{by_clients[clients]:,.0f}" for clients in several))
            model = ""
    return shown


def _rate(call: Callable[..., Any], inputs: Callable[[], tuple], clients: int, seconds: float) -> float:
    """Calls a second of clients that do not wait for each other. The first call of each is warm-up."""
    ready = threading.Barrier(clients)

    def client() -> float:
        with torch.no_grad():
            try:
                call(*inputs())
            except BaseException:
                ready.abort()  # the others would wait for ever
                raise
            ready.wait()
            count, start = 0, time.perf_counter()
            while (now := time.perf_counter()) < start + seconds:
                call(*inputs())
                count += 1
            return count / (now - start)

    with ThreadPoolExecutor(clients) as threads:
        return sum(done.result() for done in [threads.submit(client) for _ in range(clients)])
