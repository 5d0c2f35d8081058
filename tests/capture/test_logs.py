"""A forward that logs stays eager, where it logs; a logger that it only might use is no reason."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.capture import CaptureError, capture
from fxopt.capture.prints import printing

LOGGER, LOGURU = logging.getLogger("of_a_user"), pytest.importorskip("loguru").logger
WAYS: dict[str, Callable[[str], Any]] = {
    "print": lambda text: print(text),
    "logging": lambda text: LOGGER.warning(text),
    "loguru": lambda text: LOGURU.warning(text),
}


class Logging(nn.Module):
    def __init__(self, log: Callable[[str], Any]) -> None:
        super().__init__()
        self.layer, self.log = nn.Linear(4, 2), log

    def forward(self, x: Tensor, verbose: bool = False) -> Tensor:
        if verbose:
            self.log("seen")
        return self.layer(x)


@pytest.fixture
def lines() -> Any:
    """What loguru is given, with the function that gave it."""
    found: list[tuple[str, str]] = []
    handler = LOGURU.add(lambda line: found.append((line.record["function"], line.record["message"])))
    yield found
    LOGURU.remove(handler)


@pytest.mark.parametrize("log", WAYS.values(), ids=WAYS)
def test_it_stays_eager_only_where_it_logs(log: Callable) -> None:
    model, x = Logging(log), torch.randn(3, 4)
    assert not capture(model, (x,)).leaves
    with pytest.raises(CaptureError, match="prints or logs"):
        capture(model, (x, True))


def test_loguru_logs_once_a_call(lines: list) -> None:
    model, x = Logging(WAYS["loguru"]), torch.randn(3, 4)
    fast = fxopt.optimize(model)
    for _ in range(3):
        torch.testing.assert_close(fast(x, True), model.layer(x))
    assert lines == [("<lambda>", "seen")] * 3


def test_other_threads_log_as_before(lines: list) -> None:
    kept: list[str] = []
    thread = threading.Thread(target=lambda: LOGURU.warning("there"))
    with printing(kept.append):
        LOGURU.warning("here")
        thread.start()
        thread.join()
    LOGURU.warning("behind")
    assert kept == ["here"]
    assert lines == [("<lambda>", "there"), ("test_other_threads_log_as_before", "behind")]
