"""What is to happen in the middle of a trace, without a word of it in the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from fxopt.capture.function_mode import FunctionMode


@contextlib.contextmanager
def midway(function: Any, step: Callable[[], object]) -> Iterator[None]:
    """`step` is called whenever a trace, of any thread, meets a call of `function`."""
    handle = FunctionMode.__torch_function__

    def handled(mode: FunctionMode, called: Any, *rest: Any) -> Any:
        if called is function:
            step()
        return handle(mode, called, *rest)

    with mock.patch.object(FunctionMode, "__torch_function__", handled):
        yield
