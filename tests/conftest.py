"""Settings of every test: the same random numbers each time, no timings, and no GPU tests where there is no GPU."""

from __future__ import annotations

import gc
import logging
import os
import random
from itertools import chain, count
from pathlib import Path

import hypothesis
import pytest
import torch

from fxopt.torch_internals.seeds import seed_started
from fxopt.tune import tuner

# The first example of a property may build a kernel, and machines differ: time is no property.
hypothesis.settings.register_profile(
    "fxopt", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("fxopt")
_started = count()


def pytest_configure() -> None:
    """Processes beside each other (pytest -n) share the cores, and nobody reads torch's trace records.

    pytest would listen to the logger, as to all that do not propagate: 1 MB a model, and a third of the time. Without
    listeners torch makes no records.
    """
    logging.getLogger("torch.__trace").propagate = True
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _slow_ones_first(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _slow_ones_first(items: list[pytest.Item]) -> None:
    """In each half, since pytest-xdist gives two processes a half each: else one ends a minute before the other."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            files.setdefault(item.path, []).append(item)
    slow = list(files.values())
    one, other = (list(chain.from_iterable(slow[half::2])) for half in range(2))
    quick = [item for item in items if not item.get_closest_marker("slow")]
    rest = max(0, len(items) // 2 - len(one))
    items[:] = [*one, *quick[:rest], *other, *quick[rest:]]


def pytest_collection_finish() -> None:
    """Objects that imports have made are kept from collections, which are a quarter of the time with them."""
    _keep_what_is_there()
    gc.set_threshold(500_000, 20, 50)


def pytest_runtest_logstart() -> None:
    """Tests import more, and some of them collect. After 1,000 tests a collection takes 0.3 s without this."""
    if next(_started) % 250 == 249:
        _keep_what_is_there()


def _keep_what_is_there() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    random.seed(0)
    seed_started(0)


@pytest.fixture(autouse=True)
def _nothing_is_timed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rewrite that is right applies, whatever this machine is busy with; the tests marked `timed` choose."""
    if request.node.get_closest_marker("timed") is None:
        monkeypatch.setitem(tuner.EFFORTS, "fast", tuner.EFFORTS["off"])
