"""What a function uses of what threads share keeps a model eager only where the function is called."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.capture import CaptureError, capture
from fxopt.runtime import dispatcher_of

_parser, _queue = threading.local(), queue.SimpleQueue()  # type: ignore[var-annotated]


def parsed(text: str) -> float:
    _parser.calls = getattr(_parser, "calls", 0) + 1
    return float(text) * _parser.calls


def queued(text: str) -> float:
    _queue.put(text)
    return float(text) * _queue.qsize()


def caught(text: str) -> float:
    try:
        return parsed(text)
    except Exception:
        return 0.0


def swallowed(text: str) -> float:
    try:
        return parsed(text)
    except:  # noqa: E722
        return 0.0


def turned(text: str) -> float:
    try:
        return parsed(text)
    except:  # noqa: E722
        raise ValueError(text) from None


class Scaled(nn.Module):
    def __init__(self, scale: float | str, read: Callable[[str], float] = parsed) -> None:
        super().__init__()
        self.layer, self.scale, self.read = nn.Linear(4, 2), scale, read

    def forward(self, x: Tensor) -> Tensor:
        scale = self.read(self.scale) if isinstance(self.scale, str) else self.scale
        return self.layer(x) * scale


@pytest.mark.parametrize("read", [parsed, queued, caught, swallowed, turned])
def test_it_counts_where_it_is_called(read: Callable[[str], float]) -> None:
    x = torch.randn(3, 4)
    assert not capture(Scaled(2.0, read), (x,)).leaves
    before = vars(_parser).copy(), _queue.qsize()
    for model in (Scaled("2", read), nn.Sequential(Scaled("2", read))):
        with pytest.raises(CaptureError, match=r"may use _\w+ \(\w+\) in (parsed|queued)\(\), of which a change"):
            capture(model, (x,))
    assert before == (vars(_parser), _queue.qsize()) and sys.getprofile() is None


def test_eager_counts_it_once_a_call() -> None:
    model, x = Scaled("2"), torch.randn(3, 4)
    fast = fxopt.optimize(model)
    _parser.calls = 0
    for calls in (1, 2, 3):
        torch.testing.assert_close(fast(x), model.layer(x) * 2 * calls)


def test_one_capture_serves_all_threads() -> None:
    model, x = Scaled(2.0), torch.randn(3, 4)
    fast = fxopt.optimize(model)

    def call(number: int) -> None:
        _parser.calls = number
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x))

    call(0)
    for number in range(1, 4):
        thread = threading.Thread(target=call, args=(number,))
        thread.start()
        thread.join()
    assert len(dispatcher_of(fast).entries) == 1


def test_beside_a_profiler_none_can_be_told() -> None:
    sys.setprofile(profiler := lambda *event: None)
    try:
        with pytest.raises(CaptureError, match=r"_parser .* a profiler hides whether it does"):
            capture(Scaled(2.0), (torch.randn(3, 4),))
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
