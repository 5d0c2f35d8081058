"""Captures whose tensors say that they are on a GPU, without one: which passes match, and what is left.

`python -m tests.cuda.pretended ZOO.PY NAME...` prints how many kernels the graphs of zoo models would launch, before
and after the passes. Nothing is timed there: a pass that needs proof counts as if each of its trials had won.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from fxopt.capture import capture
from fxopt.config import Config
from fxopt.normalize import normalize
from fxopt.rewrites import passes
from fxopt.rewrites.framework.core import Fuel, apply
from fxopt.rewrites.framework.direct import copied
from fxopt.rewrites.framework.editor import Editor, fake_mode_of
from fxopt.rewrites.framework.regions import calls_of

VIEWS = {
    torch.ops.aten.reshape.default,
    torch.ops.aten.flatten.using_ints,
    torch.ops.aten.unflatten.int,
}


def on_cuda(value: Any, mode: Any) -> Any:
    """A fake value of the same sizes and strides on a GPU."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

    return tree_map_only(torch.Tensor, moved, value)


def pretend(module: GraphModule) -> None:
    """Every value of a graph is on a GPU; constants stay where they are, and only say so."""
    mode = fake_mode_of(module)
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = on_cuda(node.meta["val"], mode)
        if node.op == "call_function":
            args, kwargs = tree_map_only(torch.device, lambda at: torch.device("cuda"), (node.args, node.kwargs))
            node.args, node.kwargs = args, kwargs


def traced(function: Callable[..., object], inputs: Sequence[torch.Tensor]) -> GraphModule:
    """The graph of a function, traced on the CPU, where all that torch offers can be traced."""
    with FakeTensorMode() as mode, torch.no_grad():
        module = make_fx(function, pre_dispatch=True)(*map(mode.from_tensor, inputs))
    pretend(module)
    return module


@contextmanager
def constants_on_cuda() -> Iterator[None]:
    constant = Editor.constant

    def pretending(self: Editor, name: str, tensor: torch.Tensor, like: Node | None = None) -> Node:
        node = constant(self, name, tensor)
        if like is not None:
            node.meta["val"] = on_cuda(node.meta["val"], fake_mode_of(self.module))
        return node

    with patch.object(Editor, "constant", pretending):
        yield


def rewritten(graph: GraphModule, config: Config = Config()) -> tuple[GraphModule, list[Any]]:
    """A captured graph as the passes leave it on a GPU, and their findings."""
    module = copied(graph)
    pretend(module)
    normalize(module, True)
    with constants_on_cuda():
        findings = [apply(each, module, Fuel(), True, None, config) for each in passes(config)]
    normalize(module, True)
    module.recompile()
    return module, findings


def launches(graph: Graph) -> Counter[str]:
    """Calls that are no views, by name; of a function each of its calls."""
    found: Counter[str] = Counter()
    for node in graph.nodes:
        name = str(getattr(node.target, "__name__", node.target))
        inside = node.meta.get("function")
        if inside is not None:
            found += launches(inside)
        elif node.op == "call_function" and calls_of(node) and not _is_view(node) and not _copies_nothing(node):
            found[name] += 1
    return found


def _is_view(node: Node) -> bool:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.is_view or node.target in VIEWS
    return False


def _copies_nothing(node: Node) -> bool:
    target = node.target
    return target is torch.ops.aten.contiguous.default and node.args[0].meta["val"].is_contiguous()  # type: ignore


def main(zoo: str, *names: str) -> None:
    from bench.zoo import load

    for entry in load(Path(zoo)).entries():
        if names and not any(name.lower() in entry.name.lower() for name in names):
            continue
        try:
            model, args = entry.build(B=256)
            with torch.no_grad():
                captured = capture(model, entry.fresh(args))
            module, findings = rewritten(captured.graph)
        except Exception as error:
            print(f"{entry.name:32} {type(error).__name__}: {str(error)[:80]}")
            continue
        before, after = (launches(graph.graph) for graph in (captured.graph, module))
        print(f"{entry.name:32} {sum(before.values()):5} {sum(after.values()):5}  {after.most_common(9)}", flush=True)
        for found in findings:
            for change in found.rolled_back:
                print("   rolled back", found.name, change)
            if "-v" in sys.argv:
                for miss in found.misses:
                    print("   miss", found.name, miss)


if __name__ == "__main__":
    main(*[word for word in sys.argv[1:] if word != "-v"])
