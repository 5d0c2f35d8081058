"""Proxies and nodes: how torch's tracer knows which node a tensor came from, and the modes that record operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._decomp.decompositions import sym_numel
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import reset_cached_ops
from torch.fx import Graph, Node, Proxy
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.experimental.proxy_tensor import (
    PreDispatchTorchFunctionMode,
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    disable_autocast_cache,
    disable_proxy_modes_tracing,
    get_proxy_slot,
    make_fx,
    set_proxy_slot,
    thunkify,
    track_tensor_tree,
)
from torch.fx.experimental.proxy_tensor import py_sym_types as SYMBOLIC
from torch.utils._pytree import tree_map


def proxy_of(tensor: torch.Tensor, tracer: Any) -> Proxy | None:
    """None for a tensor that the tracer has not seen."""
    slot: Any = get_proxy_slot(tensor, tracer, None)
    return None if slot is None else slot.proxy


def number_proxy(number: Any, tracer: Any) -> Proxy:
    """The proxy of a symbolic number, which is computed here if no node holds it."""
    slot: Any = get_proxy_slot(number, tracer)
    return slot.force()


def record(values: Any, proxy: Proxy, tracer: Any) -> None:
    """From now on `values`, a fake tensor or a tree of them, come from this proxy, whose meta["val"] they become."""
    track_tensor_tree(values, proxy, constant=None, tracer=tracer)


def record_number(number: Any, proxy: Proxy, tracer: Any) -> None:
    """The same of a symbolic number."""
    proxy.node.meta["val"] = number
    set_proxy_slot(number, tracer, thunkify(tracer, lambda: proxy))


def record_call(operator: Any, args: tuple, kwargs: dict[str, Any], results: Any, tracer: Any) -> None:
    """From now on `results` come from a call of an operator, whose arguments may be trees with symbolic numbers."""
    taken = tree_map(tracer.unwrap_proxy, args)
    record(
        results, tracer.create_proxy("call_function", operator, taken, kwargs, operator.overloadpacket.__name__), tracer
    )


def stands_for(twin: torch.Tensor, tensor: torch.Tensor, tracer: Any) -> None:
    """`twin` comes from the same proxy as `tensor`, whose meta stays as it is."""
    set_proxy_slot(twin, tracer, get_proxy_slot(tensor, tracer))


def call_proxy(operator: Any, args: Sequence[Any], tracer: Any) -> Proxy:
    """A node for a call of an operator, named as the mode names those that it records itself."""
    proxies = [proxy_of(value, tracer) if isinstance(value, torch.Tensor) else None for value in args]
    taken = tuple(value if proxy is None else proxy for value, proxy in zip(args, proxies, strict=True))
    name = tracer.graph._target_to_str(operator.overloadpacket.__name__)
    return tracer.create_proxy("call_function", operator, taken, {}, name=name)


def nodes_behind(node: Node | None, graph: Graph) -> Iterator[Node]:
    """The nodes that come after `node`; all of the graph's for None."""
    root = graph._root
    node = root if node is None else node
    while (node := node.next) is not root:
        yield node


def is_erased(node: Node) -> bool:
    """Whether the node was taken out of its graph."""
    return node._erased
