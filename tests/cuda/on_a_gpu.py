"""Graphs whose tensors say that they are on a GPU, on a machine without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fxopt.findings import PassFindings
from fxopt.rewrites.framework.core import Fuel, Rewrite, apply


def graph_of(
    function: Callable[..., object], shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32
) -> GraphModule:
    """The graph of a function of tensors of these shapes, before autograd's decompositions."""
    with FakeTensorMode(), torch.no_grad():
        fakes = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
        return make_fx(function, pre_dispatch=True)(*fakes)


def rewritten(module: GraphModule, *passes: Rewrite, inference: bool = True) -> list[PassFindings]:
    """What passes do to a graph, where nothing can be timed."""
    findings = [apply(each, module, Fuel(), inference) for each in passes]
    module.recompile()  # what a test calls is what the graph says now
    return findings


def names_of(module: GraphModule) -> list[str]:
    """The operators of a graph."""
    return [str(node.target).removesuffix(".default") for node in module.graph.nodes if node.op == "call_function"]
