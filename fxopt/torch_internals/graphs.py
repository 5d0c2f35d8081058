"""Graphs of torch.fx and the modules that own them."""

from __future__ import annotations

import weakref

from torch.fx import GraphModule


def known_weakly(module: GraphModule) -> GraphModule:
    """The module, which its graph now knows without holding it.

    A graph and its nodes are a cycle. It would keep the module, and by that the weights of the submodules that stay
    opaque, until a collection. Utilities of torch.fx that ask `graph.owning_module is module` have to run before.
    """
    module.graph.owning_module = weakref.proxy(module)  # type: ignore[assignment]
    return module
