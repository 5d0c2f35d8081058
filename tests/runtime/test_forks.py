"""Optimized models in forked and spawned processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.capture.trace import TRACE_LOCK
from fxopt.runtime import dispatcher_of
from tests.runtime.midway import midway

CONFIG = fxopt.Config(tune="off")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(9, 4), nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 1))

    def forward(self, x, ids):
        return self.layers(torch.cat([x, self.table(ids)], 1))


def example(rows: int = 5) -> tuple:
    return torch.randn(rows, 3), torch.randint(0, 9, (rows,))


def in_fork(check: Callable[[], Any]) -> None:
    """`check()` in a forked child with one thread of torch's, as a worker has; fails where it fails or hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # what hangs is killed
        code = 1
        try:
            torch.set_num_threads(1)
            check()
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0


def right(fast: nn.Module, model: nn.Module, *rows: int) -> None:
    for n in rows or (5, 1, 0, 64):
        inputs = example(n)
        torch.testing.assert_close(fast(*inputs), model(*inputs))
    assert dispatcher_of(fast).entries[0].executable is not None


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("called", [True, False])
def test_a_child_calls_and_captures(called, grad):
    with torch.set_grad_enabled(grad):
        model = Ranker().eval()
        fast = fxopt.optimize(model, config=CONFIG)
        if called:
            right(fast, model)
        in_fork(lambda: right(fast, model))
        right(fast, model)


def test_after_calls_on_several_threads_of_torch():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        model = Ranker().eval()
        fast = fxopt.optimize(model, config=CONFIG)
        with torch.no_grad():
            right(fast, model, 4096, 3)
            in_fork(lambda: right(fast, model, 4096, 3))
    finally:
        torch.set_num_threads(threads)


def test_locks_of_other_threads_are_free():
    model = Ranker()
    fast = fxopt.optimize(model, config=CONFIG)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with TRACE_LOCK, dispatcher_of(fast)._lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        in_fork(lambda: right(fast, model))
    finally:
        done.set()
        thread.join()


def test_while_another_thread_traces():
    """What the trace has changed in torch is as it was in the child, whose threads know nothing of it."""
    model, other, length = Ranker(), Ranker(), len
    fast = fxopt.optimize(model, config=CONFIG)
    inside, done = threading.Event(), threading.Event()

    def wait() -> None:
        if threading.current_thread() is thread:
            inside.set()
            done.wait(60)

    def trace() -> None:
        with midway(torch.cat, wait):
            fxopt.optimize(other, inputs, fxopt.Config(tune="off", verify="off"))

    inputs = example()
    thread = threading.Thread(target=trace)
    thread.start()
    inside.wait(60)
    assert len is not length  # a builtin is changed for the time of a trace

    def check() -> None:
        assert len is length
        right(fast, model)

    try:
        in_fork(check)
    finally:
        done.set()
        thread.join()
    assert len is length


def _work(fast: nn.Module, inputs: tuple, results: Any) -> None:
    results.put(fast(*inputs).detach().tolist())


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_spawn(shared):
    model, inputs = Ranker().eval(), example()
    fast = fxopt.optimize(model, inputs, CONFIG)
    if shared:
        fast.share_memory()
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_work, args=(fast, inputs, results))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    torch.testing.assert_close(torch.tensor(results.get()), model(*inputs))


def test_workers_of_a_loader():
    model = Ranker().eval()
    fast = fxopt.optimize(model, example(), CONFIG)
    rows = [example(1) for _ in range(6)]

    class Scores(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, item: int) -> Any:
            return fast(*rows[item]).detach()

    loader = torch.utils.data.DataLoader(Scores(), batch_size=2, num_workers=2, timeout=60)
    torch.testing.assert_close(torch.cat(list(loader)).flatten(), torch.cat([model(*row) for row in rows]).flatten())
