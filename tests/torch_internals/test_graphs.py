"""A graph knows its module without holding it."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import fx, nn

from fxopt.torch_internals.graphs import known_weakly


def test_the_module_is_freed_with_the_last_reference() -> None:
    module = known_weakly(fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2))))
    graph, held = module.graph, weakref.ref(module)
    assert graph.owning_module.get_submodule("0").in_features == 2, "torch.fx asks a graph for its module elsewhere now"
    graph.lint()
    module.recompile()
    assert module(torch.ones(1, 2)).shape == (1, 2)
    gc.disable()
    try:
        del module
        assert held() is None, "a GraphModule of torch.fx is in another cycle than that through its graph now"
    finally:
        gc.enable()
