"""The server of the example answers each request with its own rows, and the clients run against it."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import clients
import load
from server import Server


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def test_requests_that_wait_share_a_call_and_errors_do_not() -> None:
    calls: list[int] = []

    def model(x: Tensor) -> Tensor:
        calls.append(len(x))
        if (x < 0).any():
            raise IndexError("negative")
        return x * 2

    server = Server(model, threads=0, most=6)
    answers = [server.ask((torch.full((rows,), float(value)),)) for rows, value in ((2, 1), (3, -1), (2, 5), (1, 7))]
    server._waiting.put(None)
    server._work()
    assert calls == [7, 2, 3, 2, 1], "the first three have more than six rows"
    assert [answer.exception() is None for answer in answers] == [True, False, True, True]
    for number, rows, value in ((0, 2, 2.0), (2, 2, 10.0), (3, 1, 14.0)):
        assert answers[number].result().tolist() == [value] * rows


def test_a_stall_is_seen_by_all_requests_that_came_meanwhile() -> None:
    stalls = iter([0.2])

    def model(x: Tensor) -> Tensor:
        time.sleep(next(stalls, 0.0))
        return x

    server = Server(model)
    found = clients.open_loop(server, [(torch.ones(3),)], rate=200, seconds=0.2)
    server.close()
    assert found.rows == 3 * len(found.latencies)
    assert found.percentile(0.5) > 0.02 and max(found.latencies) > 0.1


def test_load_runs(capsys: pytest.CaptureFixture[str]) -> None:
    load.main(["--only", "eager", "fxopt", "--clients", "1", "2", "--seconds", "0.05", "--tables", "3"])
    said = capsys.readouterr().out
    assert said.count("new weights") == 2 and said.count("memory grew by") == 2


def test_a_soak_runs(capsys: pytest.CaptureFixture[str]) -> None:
    load.main(["--only", "eager", "--clients", "2", "--seconds", "0.05", "--soak", "0.003", "--tables", "3"])
    assert "eager: " in capsys.readouterr().out
