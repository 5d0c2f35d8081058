"""One trace of a function on fake tensors into a graph of ATen overloads before autograd."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.fx.experimental._config as shape_config
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxopt.capture.places import Places

TRACE_LOCK = threading.RLock()  # make_fx keeps its current tracer in a global


def trace(
    run: Callable[[], Sequence[Any]],
    tensors: Sequence[torch.Tensor],
    fake_mode: FakeTensorMode,
    places: Places,
) -> torch.fx.GraphModule:
    """Record what `run()` does with `tensors`, which become the placeholders in order.

    `run` returns the flat outputs. Every call_function node gets meta["place"].
    """

    def traced(flat: list[torch.Tensor]) -> list[Any]:
        _record_places(proxy_tensor.get_proxy_mode().tracer, places)
        return list(run())

    with (
        TRACE_LOCK,
        shape_config.patch(backed_size_oblivious=True),
        mock.patch.object(proxy_tensor, "_extract_tensor_metadata", lambda tensor: None),  # 40% of the time, unused
        fake_mode,
    ):
        return proxy_tensor.make_fx(traced, tracing_mode="real", pre_dispatch=True)(list(tensors))


def _record_places(tracer: Any, places: Places) -> None:
    create = tracer.create_node

    def create_node(kind: str, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = create(kind, *args, **kwargs)
        if kind == "call_function" or kind == "call_module":
            node.meta["place"] = places.here()
        return node

    tracer.create_node = create_node
