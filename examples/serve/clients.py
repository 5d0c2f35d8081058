"""Clients of a server: some that wait for each answer, or one that asks at random moments whatever it gets."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from server import Request, Server


@dataclass(frozen=True)
class Load:
    """What clients saw. latencies: seconds from when a request was due to its answer; rows: answered in `seconds`."""

    latencies: tuple[float, ...]
    rows: int
    seconds: float

    def percentile(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds

    @property
    def requests_per_second(self) -> float:
        return len(self.latencies) / self.seconds


def closed_loop(server: Server, requests: Sequence[Request], clients: int, seconds: float) -> Load:
    """Each client asks again as soon as it has its answer."""
    seen: list[tuple[float, int]] = []
    started = time.perf_counter()

    def client(seed: int) -> None:
        rng = random.Random(seed)
        while (asked := time.perf_counter()) < started + seconds:
            request = rng.choice(requests)
            server.ask(request).result()
            seen.append((time.perf_counter() - asked, len(request[0])))

    _at_once([lambda seed=seed: client(seed) for seed in range(clients)])  # type: ignore[misc]
    return _load(seen, started)


def open_loop(server: Server, requests: Sequence[Request], rate: float, seconds: float) -> Load:
    """`rate` requests a second at random moments (a Poisson process), as from users who do not know of each other.

    A request that could not be sent in time counts from the moment when it was due, so a stall is seen by all requests
    that came during it (Gil Tene's "coordinated omission").
    """
    rng, seen, asked = random.Random(0), list[tuple[float, int]](), list[Future]()
    started = due = time.perf_counter()
    while (due := due + rng.expovariate(rate)) < started + seconds:
        if (early := due - time.perf_counter()) > 0:
            time.sleep(early)
        request = rng.choice(requests)
        answer = server.ask(request)
        answer.add_done_callback(_noted(seen, due, len(request[0])))
        asked.append(answer)
    for answer in asked:
        answer.result()
    return _load(seen, started)


def _noted(seen: list[tuple[float, int]], due: float, rows: int) -> Callable[[Future], None]:
    return lambda _: seen.append((time.perf_counter() - due, rows))


def _load(seen: Sequence[tuple[float, int]], started: float) -> Load:
    latencies = tuple(latency for latency, _ in seen)
    return Load(latencies, sum(rows for _, rows in seen), time.perf_counter() - started)


def _at_once(works: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
