"""``torch.compile(model, backend="fxopt")``: the same pipeline on the graphs that Dynamo finds.

Dynamo passes parameters, sizes and Python floats as arguments of its graph. Here parameters become state again (their
shapes are static), sizes are read from the tensors that have them, and floats are fixed per capture. The result runs
under autograd as eager does, so it trains; what cannot be captured runs as Dynamo found it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxopt.config import Config
from fxopt.locks import lock
from fxopt.optimize import compile
from fxopt.runtime import Executable
from fxopt.runtime.context import ambient
from fxopt.runtime.executable import run_eagerly
from fxopt.runtime.flatten import rebuilder, same_value
from fxopt.runtime.signature import Signature, State
from fxopt.torch_internals.dynamo import is_state
from fxopt.torch_internals.modes import is_traced
from fxopt.torch_internals.seeds import draws_put_back


def backend(gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None) -> Any:
    """A Dynamo backend. Captures at the first call, when there are real tensors.

    Args:
        options: fields of :class:`fxopt.Config`, as in ``torch.compile(model, backend="fxopt", options={...})``.
    """
    return _Compiled(gm, Arguments.of(gm, example_inputs), Config(**(options or {})))


@dataclass(frozen=True)
class Arguments:
    """What each argument of a Dynamo graph is, by position.

    state: parameters and buffers; tensors: other tensors; sizes: position to the (position, dim) that has the size;
    scalars: Python floats, passed as 0-d tensors of which only ``.item()`` is used; constants: anything else.
    """

    state: tuple[int, ...]
    tensors: tuple[int, ...]
    sizes: dict[int, tuple[int, int]]
    scalars: tuple[int, ...]
    constants: tuple[int, ...]

    @classmethod
    def of(cls, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Arguments:
        nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
        tensors = [i for i, example in enumerate(example_inputs) if isinstance(example, Tensor)]
        state = [i for i in tensors if _is_state(nodes[i], example_inputs[i])]
        scalars = [i for i in tensors if example_inputs[i].dim() == 0 and _only_item(nodes[i])]
        inputs = [i for i in tensors if i not in state and i not in scalars]
        dims = {
            str(n): (i, d) for i in reversed(inputs) for d, n in enumerate(_fake(nodes[i], example_inputs[i]).shape)
        }
        others = [i for i in range(len(example_inputs)) if i not in set(tensors)]
        sizes = {i: dims[str(example_inputs[i])] for i in others if _has_size(example_inputs[i], dims)}
        constants = tuple(i for i in others if i not in sizes)
        return cls(tuple(state), tuple(inputs), sizes, tuple(scalars), constants)

    def fixed(self, args: Sequence[Any]) -> list[Any]:
        """The values that a capture has baked in."""
        return [args[i].item() for i in self.scalars] + [args[i] for i in self.constants]


class GraphWithState(nn.Module):
    """A Dynamo graph as a module of its tensor inputs alone."""

    def __init__(self, gm: fx.GraphModule, arguments: Arguments, args: Sequence[Any]) -> None:
        super().__init__()
        self.gm = gm
        self.arguments = arguments
        self.count = len(args)
        self.scalars = tuple(_Scalar(args[i].item()) for i in arguments.scalars)
        self.constants = tuple(args[i] for i in arguments.constants)
        for i in arguments.state:
            register = self.register_parameter if isinstance(args[i], nn.Parameter) else self.register_buffer
            register(_name(i), args[i])

    def forward(self, *tensors: Tensor) -> Any:
        known: dict[int, Any] = dict(zip(self.arguments.tensors, tensors, strict=True))
        known.update((i, getattr(self, _name(i))) for i in self.arguments.state)
        known.update(zip(self.arguments.scalars, self.scalars, strict=True))
        known.update(zip(self.arguments.constants, self.constants, strict=True))
        known.update((i, known[j].shape[d]) for i, (j, d) in self.arguments.sizes.items())
        return self.gm.forward(*(known[i] for i in range(self.count)))


@dataclass(frozen=True)
class _Scalar:
    value: float

    def item(self) -> float:
        return self.value


class _Entry:
    """One capture of a Dynamo graph."""

    def __init__(self, module: GraphWithState, executable: Executable, args: Sequence[Any]) -> None:
        capture, arguments = executable.capture, module.arguments
        self.executable = executable
        self.ambient = ambient()
        self.arguments = arguments
        self.fixed = arguments.fixed(args)
        self.signature = Signature.of_capture(capture)
        self.rebuild = rebuilder(capture.out_spec)
        self.state = State(module, capture)
        positions = {_name(i): i for i in arguments.state}
        self.sources = [positions[slot.name] if slot.module == "" else slot for slot in capture.state]
        self.module = module

    def match(self, args: Sequence[Any]) -> list[Tensor] | None:
        inputs = self.signature.bind(tuple(args[i] for i in self.arguments.tensors), {})
        if inputs is None or self.ambient != ambient():
            return None
        if not all(map(same_value, self.arguments.fixed(args), self.fixed)):
            return None
        state = [args[s] if isinstance(s, int) else s.read(self.module) for s in self.sources]
        return [*state, *inputs] if self.state.fits(state) else None

    def run(self, tensors: Sequence[Tensor]) -> Any:
        return self.rebuild(self.executable.run(*tensors))


class _Compiled:
    """The callable that Dynamo runs."""

    def __init__(self, gm: fx.GraphModule, arguments: Arguments, config: Config) -> None:
        self.gm = gm
        self.arguments = arguments
        self.config = config
        self.entries: tuple[_Entry, ...] = ()
        self.attempts = 0
        self._lock = lock()

    def __call__(self, *args: Any) -> Any:
        if is_traced():
            return self.gm(*args)
        found = self._find(args) or self._capture(args)
        if found is None:
            return self.gm(*args)
        entry, tensors = found
        try:
            return entry.run(tensors)
        except Exception as error:
            failure = error
        try:
            return run_eagerly(failure, self.gm, args, {})
        finally:
            del failure

    def _find(self, args: Sequence[Any]) -> tuple[_Entry, list[Tensor]] | None:
        for entry in self.entries:
            tensors = entry.match(args)
            if tensors is not None:
                return entry, tensors
        return None

    def _capture(self, args: Sequence[Any]) -> tuple[_Entry, list[Tensor]] | None:
        with self._lock:
            found = self._find(args)
            if found is not None or self.attempts == self.config.max_captures:
                return found
            self.attempts += 1
            module = GraphWithState(self.gm, self.arguments, args)
            try:
                with draws_put_back():  # those of trials
                    tensors = tuple(args[i] for i in self.arguments.tensors)
                    earlier = [entry.executable.capture for entry in self.entries]
                    executable = compile(self.config, module, tensors, {}, earlier)
            except Exception:  # not captured, or the inputs are bad: the graph runs as it is
                return None
            self.entries = (_Entry(module, executable, args), *self.entries)
            return self._find(args)


def _name(position: int) -> str:
    return f"arg{position}"


def _fake(node: fx.Node, example: Tensor) -> Tensor:
    """The placeholder's tensor with symbolic sizes, where Dynamo recorded one."""
    return node.meta.get("example_value", example)


def _is_state(node: fx.Node, example: Tensor) -> bool:
    sizes = _fake(node, example).shape
    return (isinstance(example, nn.Parameter) or is_state(node)) and all(isinstance(n, int) for n in sizes)


def _only_item(node: fx.Node) -> bool:
    return bool(node.users) and all(user.op == "call_method" and user.target == "item" for user in node.users)


def _has_size(example: Any, dims: dict[str, tuple[int, int]]) -> bool:
    return isinstance(example, torch.SymInt) and str(example) in dims
