"""What a graph has done before it fails, undone: eager runs next, and does it once.

A graph without effects, or whose effects come after all that can fail, runs as it is. For any other the little that it
writes is kept for the time of a call; where that is much, the model stays eager.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from fxopt.names import is_users, names_in, names_stored
from fxopt.reach.code import MAKING, Code
from fxopt.runtime.executable import Executable, has_own_backward
from fxopt.runtime.held import CONSTANTS, MOST, Attributes, Kept, bytes_of
from fxopt.runtime.refusals import Refusals
from fxopt.shape.aliases import Aliases, is_random, written_arguments
from fxopt.torch_internals.autograd import StopRecomputation, set_grad_enabled

if TYPE_CHECKING:
    from fxopt.capture import LeafCall

# Operators that raise for no data, of sizes that a capture has checked.
_CERTAIN_NAMES = """
    linear addmm mm bmm matmul baddbmm addmv mv dot einsum sum mean amax amin cumsum softmax log_softmax layer_norm
    group_norm rms_norm batch_norm instance_norm dropout native_dropout cat stack view reshape _unsafe_view expand
    permute transpose t unsqueeze squeeze select slice split split_with_sizes unbind flatten unflatten alias detach
    clone contiguous _to_copy to copy_ fill_ zero_ zeros ones full empty zeros_like ones_like full_like empty_like
    new_zeros new_ones new_full arange expand_as view_as type_as lift_fresh_copy sym_size sym_numel var std norm
    linalg_vector_norm prelu celu selu scaled_dot_product_attention conv1d conv2d avg_pool1d repeat chunk
    narrow lerp_ lerp pad constant_pad_nd masked_fill masked_fill_ bucketize rand_like randn_like movedim"""
_CERTAIN = frozenset(_CERTAIN_NAMES.split())
_OF_DATA_NAMES = """
    floor_divide remainder fmod pow bernoulli bernoulli_ __lshift__ __rshift__ floor_divide_ remainder_ fmod_ pow_
    div div_ normal_ binary_cross_entropy"""
_OF_DATA = frozenset(_OF_DATA_NAMES.split())
_DIVISIONS = (operator.truediv, operator.floordiv, operator.mod)


class TooMuch(Exception):
    """Why a graph cannot serve: a call would have to keep, or to compare, too much."""


class Undo:
    """Keeps what a graph edits before something of it may fail.

    Args:
        executable: its graph is rewritten by now.
        model: whose state it edits.

    Raises:
        TooMuch: what it edits is large, or is not the model's.
    """

    def __init__(self, executable: Executable, model: nn.Module) -> None:
        code = executable.graph or executable.capture.graph
        nodes, placeholders = list(code.graph.nodes), code.graph.find_nodes(op="placeholder")
        last = _last_to_fail(nodes, code)
        before = nodes[: last + 1]
        _check_outside(before, code)
        edited = _edited(code.graph, before)
        calls = [call for node in before if (call := _leaf(node, code)) is not None]
        self._numbers = [number for number, node in enumerate(placeholders) if node in edited]
        self._slots = sorted({slot for call in calls for slot in call.signature.state}, key=str)
        self._touched: dict[nn.Module, set[str]] = {}
        stored = set(_stores(nodes[last + 1 :], code))  # nothing fails behind them
        for path, name in sorted({touched for call in calls for touched in call.signature.touched}):
            module = model.get_submodule(path)
            if (module, name) not in stored:
                self._touched.setdefault(module, set()).add("_buffers" if name in module._buffers else name)
        for call in calls:
            for module, names in may_change(call.module).items():
                self._touched.setdefault(module, set()).update(names)
        self._random = bool(calls) or any(_may_draw(node, code) for node in before)
        self._switches = _switches_gradients(code)
        self._attributes = Attributes(self._touched)
        self._model = model
        kept = [placeholders[number].meta["val"] for number in self._numbers]
        if sum(map(bytes_of, (*kept, *(slot.read(model) for slot in self._slots)))) > MOST:
            raise TooMuch(
                "edits large tensors before something that may fail: what a failed call edits, eager edits again"
            )

    @property
    def needed(self) -> bool:
        return bool(self._numbers or self._slots or self._touched or self._random or self._switches)

    def around(self, run: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """`run`, of which nothing is left where it raises."""

        def undoing(*tensors: Any) -> Sequence[Any]:
            kept = Kept([*(tensors[number] for number in self._numbers), *(s.read(self._model) for s in self._slots)])
            attributes = self._attributes.now()
            random = random_states() if self._random else []
            recorded = torch.is_grad_enabled()
            try:
                return run(*tensors)
            except StopRecomputation:
                raise
            except Exception:
                kept.put_back()
                attributes.put_back()
                for put_back, state in random:
                    put_back(state)
                raise
            finally:
                if self._switches:
                    set_grad_enabled(recorded)

        return undoing


def _switches_gradients(module: fx.GraphModule) -> bool:
    """Whether it turns gradients off or on for a while, which an error in between would leave so."""
    graphs = (each.graph for each in module.modules() if isinstance(each, fx.GraphModule))
    return any(graph.find_nodes(op="call_function", target=set_grad_enabled) for graph in graphs)


def _leaf(node: fx.Node, module: fx.GraphModule) -> LeafCall | None:
    called: Any = module.get_submodule(str(node.target)) if node.op == "call_module" else None
    return called if hasattr(called, "signature") else None


def may_change(leaf: nn.Module) -> dict[nn.Module, set[str]]:
    """What an opaque module may change of its own for some data only: the attributes that its code assigns, other than
    while it makes objects, and tensors and containers that it names.
    """
    code = Code.behind([leaf])
    running = [each.__code__ for each in code.functions.values() if each.__name__ not in MAKING]
    named = frozenset[str]().union(*(names_in(each)[1] for each in running))
    stored = frozenset[str]().union(*(names_stored(each, "STORE_ATTR") for each in running))
    assigned = code.names if named & MAKING or "setattr" in code.names else stored  # it may make itself again
    found: dict[nn.Module, set[str]] = {}
    for module in leaf.modules():
        if is_users(type(module).__module__):
            own = vars(module)
            found[module] = {n for n in code.names & own.keys() if n in assigned or type(own[n]) not in CONSTANTS}
            if code.names & module._buffers.keys():
                found[module].add("_buffers")
    return {module: names for module, names in found.items() if names}


def _stores(nodes: Sequence[fx.Node], module: fx.GraphModule) -> Iterator[tuple[nn.Module, str]]:
    """The attributes that these nodes assign."""
    from fxopt.capture.effects import StoreAttribute  # the capture has paid for this import

    called = (module.get_submodule(str(node.target)) for node in nodes if node.op == "call_module")
    return ((each.module, each.name) for each in called if isinstance(each, StoreAttribute))


def _check_outside(before: Sequence[fx.Node], module: fx.GraphModule) -> None:
    """Refuse an opaque submodule that changes what nobody can undo; the last of these nodes is the last that may fail.
    A layer of torch's own fails before its hooks change anything.
    """
    for node in before:
        call = _leaf(node, module)
        if call is None or not call.signature.outside:
            continue
        if node is not before[-1] or is_users(type(call.module).__module__):
            raise TooMuch(
                f"{call.path} stays opaque and changes {call.signature.outside}, which is not the model's: where the "
                "call fails behind it, eager would change it again"
            )


def _last_to_fail(nodes: Sequence[fx.Node], module: fx.GraphModule) -> int:
    """The place of the last node that may raise; -1 where none may, or nothing is done that one would leave behind."""
    if not any(written_arguments(node) or _may_draw(node, module) or _leaf(node, module) for node in nodes):
        return -1
    refusals = Refusals(module.graph)
    fails = (place for place, node in enumerate(nodes) if _may_fail(node, module) or refusals.may_meet(node))
    return max(fails, default=-1)


def _edited(graph: fx.Graph, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """All that shares memory with what these nodes edit; of what an opaque submodule holds, only what it was seen to
    edit: keeping a table of 1 MB at each call took half of the call."""
    written = [argument for node in nodes for argument in written_arguments(node) if argument is not node]
    aliases = Aliases(graph if written else None)
    return {other for argument in written for other in aliases.sharing(argument)}


def _may_fail(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether a call may raise because of its data: an id, a condition, a size that data decide."""
    if node.op == "call_module":
        return _leaf(node, module) is not None or has_own_backward(node, module)
    if node.op != "call_function":
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return _may_raise(node)
    name = node.target.overloadpacket.__name__
    certain = name in _CERTAIN or (torch.Tag.pointwise in node.target.tags and name not in _OF_DATA)
    return not (certain or (name in ("div", "div_") and "rounding_mode" not in node.kwargs))


def _may_draw(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether it may draw random numbers: what has a backward of its own holds other operators, or runs as it is."""
    return is_random(node) or has_own_backward(node, module)


def _may_raise(node: fx.Node) -> bool:
    """Of a function of numbers: a division by 0, and whatever of math has no value."""
    if node.target in _DIVISIONS:
        return not isinstance(node.args[1], int) or not node.args[1]
    return getattr(node.target, "__module__", "") not in ("_operator", "torch._C")


def random_states() -> list[tuple[Callable[[Tensor], None], Tensor]]:
    """Of torch's generators, of the CPU and of this thread's GPU, and what sets each of them."""
    states: list[tuple[Callable[[Tensor], None], Tensor]] = [(torch.set_rng_state, torch.get_rng_state())]
    if torch.cuda.is_initialized():
        states.append((torch.cuda.set_rng_state, torch.cuda.get_rng_state()))
    return states
