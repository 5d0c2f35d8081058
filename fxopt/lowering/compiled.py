"""Config(lower="inductor"): the islands of a rewritten graph compiled, everything else called as before.

Not the default: the rewrites leave little. Of 17 third-party models 9 have no island at all and 2 edit memory in
place; 5 others run at 0.69-1.35 of the plain path's speed at batch 1, 0.98-1.09 at 256 and 0.99-1.07 at 4096, for 3-40
seconds of compiling on a busy machine (one thread, CPU seconds).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions

from fxopt.capture import Capture
from fxopt.capture.guards import Guards, conditions
from fxopt.lowering.inductor import compile_graph
from fxopt.lowering.islands import computes, islands, obstacle
from fxopt.rewrites.framework.direct import direct
from fxopt.runtime.executable import Executable
from fxopt.torch_internals.symbols import as_python, expression, free_symbols

_PREFIX = "island_"


class NotLowered(Exception):
    """Why the graph stays as it was."""


def lower(executable: Executable, inference: bool) -> tuple[Executable, str]:
    """The same with compiled islands, and what was compiled, in words.

    Its `run` goes back to that of `executable` where sizes or strides are others than compiled for.

    Args:
        inference: nothing will be differentiated.

    Raises:
        NotLowered: nothing to compile, memory is edited in place, or the compiler failed.
    """
    capture, module = executable.capture, executable.graph
    assert module is not None
    known = len(capture.shape_env.guards)
    fused, operators = _with_islands(module, capture)
    calls = [node for node in fused.graph.find_nodes(op="call_module") if str(node.target).startswith(_PREFIX)]
    wanted = None if inference else _differentiated(fused, capture)
    for call in calls:
        _compile(fused, call, capture, wanted)
    direct(fused)
    what = f"{operators} operators in {len(calls)} compiled calls"
    run = _guarded(fused.forward, executable.run, _guards(capture, known), len(capture.state))
    return replace(executable, run=run), what


def _with_islands(module: GraphModule, capture: Capture) -> tuple[GraphModule, int]:
    """A copy in which each island is a submodule, and how many operators they hold."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copied = GraphModule(module, graph)
    edit = obstacle(copied)
    if edit is not None:
        raise NotLowered(f"'{edit.name}' writes to memory that others may read")
    found = list(islands(copied))
    if not found:
        raise NotLowered("no two neighbours that one loop could compute")
    operators = sum(computes(node) for part in found for node in part.nodes)
    return fuse_by_partitions(copied, [part.nodes for part in found], prefix=_PREFIX), operators


def _differentiated(module: GraphModule, capture: Capture) -> set[Node]:
    """What may want a gradient: float tensors that depend on a parameter, or on an input that had one."""
    wanting = [slot.kind == "parameter" for slot in capture.state] + [spec.requires_grad for spec in capture.inputs]
    placeholders = module.graph.find_nodes(op="placeholder")
    found = {node for node, wants in zip(placeholders, wanting, strict=True) if wants and _is_float(node)}
    for node in module.graph.nodes:
        if node.op.startswith("call") and _is_float(node) and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _is_float(node: Node) -> bool:
    values = node.meta.get("val")
    values = values if isinstance(values, list | tuple) else [values]
    return any(not isinstance(value, torch.Tensor) or value.is_floating_point() for value in values)


def _compile(module: GraphModule, call: Node, capture: Capture, wanted: set[Node] | None) -> None:
    """The submodule that `call` calls as a compiled function, which also takes the sizes its inputs do not show."""
    island: Any = module.get_submodule(str(call.target))
    sources: Any = call.args
    values = [node.meta["val"] for node in sources]
    hidden = list(_hidden_sizes(values))
    sizes = [_read_size(call, symbol) for symbol in hidden]
    count = len(values)

    def without_sizes(*arguments: Any) -> Any:
        return island(*arguments[:count])

    try:
        examples = [*values, *(size.meta["val"] for size in sizes)]
        floats = None if wanted is None else [node in wanted for node in (*sources, *sizes)]
        run = compile_graph(without_sizes, examples, capture.fake_mode, floats, single=_gives_one(island))
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise NotLowered(f"Inductor failed, {type(error).__name__}: {reason}") from error
    call.op, call.target, call.args = "call_function", run, (*sources, *sizes)


def _gives_one(island: GraphModule) -> bool:
    (output,) = island.graph.find_nodes(op="output")
    return isinstance(output.args[0], Node)


def _hidden_sizes(values: Sequence[Any]) -> Iterator[sympy.Symbol]:
    """Symbols that the values depend on, and that none of them has as a size: a compiled function cannot solve
    26 * s0 = x.shape[0]."""
    sizes = [size for value in values for size in (value.shape if isinstance(value, torch.Tensor) else (value,))]
    shown = {expression(size) for size in sizes if isinstance(size, torch.SymInt)}
    needed = {symbol for value in values for symbol in free_symbols(value)}
    yield from sorted(needed - shown, key=str)


def _read_size(call: Node, symbol: sympy.Symbol) -> Node:
    """A node in front of `call` with the value of `symbol`, which is a size of some input of the graph."""
    for node in call.graph.find_nodes(op="placeholder"):
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt) and expression(size) == symbol:
                with call.graph.inserting_before(call):
                    found = call.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                found.meta["val"] = size
                return found
    raise NotLowered(f"no input has the size {symbol}")


def _guards(capture: Capture, known: int) -> Guards | None:
    """What compiling assumed of the sizes beyond what the capture holds for."""
    names = {name: (i, d) for i, spec in reversed([*enumerate(capture.inputs)])
             for d, name in enumerate(spec.dims) if isinstance(name, str)}  # fmt: skip
    new = list(conditions(capture.shape_env))[known:]
    used = sorted({str(symbol) for term in new for symbol in term.free_symbols})
    if not set(used) <= names.keys():
        raise NotLowered("it holds only for sizes that depend on data")
    relations = tuple(dict.fromkeys(map(as_python, new)))
    return Guards(relations=relations, sources=tuple((name, names[name]) for name in used)) if new else None


def _guarded(
    compiled: Callable[..., Any], plain: Callable[..., Any], guards: Guards | None, states: int
) -> Callable[..., Sequence[Any]]:
    """`compiled` where it holds. Compiled code asserts the strides of what it reads, before it writes anything."""
    holds = operator.truth if guards is None else guards.holds

    def run(*tensors: Any) -> Sequence[Any]:
        if guards is None or holds(tensors[states:]):
            try:
                return compiled(*tensors)
            except AssertionError:  # inputs laid out as no call before, or an assertion of the model's own
                pass
        return plain(*tensors)

    return run
