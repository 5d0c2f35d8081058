"""A tracer as a capture has it: a graph that grows, and fake tensors whose operators it records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph

from fxopt.torch_internals.fake_tensors import FakeTensorMode
from fxopt.torch_internals.shape_env import TraceShapeEnv
from fxopt.torch_internals.tracing import ProxyTorchDispatchMode, PythonKeyTracer, enable_python_dispatcher, record


@pytest.fixture
def environment() -> TraceShapeEnv:
    return TraceShapeEnv()


@pytest.fixture
def fake_mode(environment: TraceShapeEnv) -> FakeTensorMode:
    return FakeTensorMode(shape_env=environment)


@pytest.fixture
def tracer() -> Any:
    tracer: Any = PythonKeyTracer()
    tracer.root, tracer.graph = nn.Module(), Graph(tracer_cls=PythonKeyTracer)
    return tracer


@pytest.fixture
def x(environment: TraceShapeEnv, fake_mode: FakeTensorMode, tracer: Any) -> torch.Tensor:
    """[B, 4], the only placeholder of the tracer's graph."""
    with fake_mode:
        x = torch.empty(environment.size("x", 5, positive=False), 4)
    record(x, tracer.create_proxy("placeholder", "x", (), {}), tracer)
    return x


@pytest.fixture
def recording(tracer: Any, fake_mode: FakeTensorMode, x: torch.Tensor) -> Iterator[None]:
    """Operators on `x` are recorded behind it."""
    with fake_mode, enable_python_dispatcher(), ProxyTorchDispatchMode(tracer, "real", pre_dispatch=True):
        yield
