"""One run of a model or graph that leaves nothing behind: no mutated tensor, no random number, no gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxopt import trees
from fxopt.capture.errors import is_passing
from fxopt.capture.state import ModelCopy, StateSlot

if TYPE_CHECKING:
    from fxopt.capture import Capture


@dataclass
class Trial:
    """What one run produced.

    Attributes:
        values: by readable name: the tensors among the outputs, the state and inputs it mutated, and gradients.
        plain: the other outputs that compare exactly: numbers of a size, text that may hold one.
        structure: TreeSpec of the result (None for a graph, whose outputs are flat).
        error: what it raised instead.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    structure: pytree.TreeSpec | None = None
    error: Exception | None = None


class Setting:
    """The tensors of one trial: views of the inputs and the state, or copies of what the run may write to.

    Inference tensors are copied too: they count no versions, and cannot become leaves.

    Args:
        writes: the graph declares that it mutates something; then inputs and parameters are copied too.
        gradients: make every float tensor a leaf of its own, and differentiate.
    """

    def __init__(self, capture: Capture, inputs: Sequence[Tensor], writes: bool, gradients: bool) -> None:
        self.capture = capture
        self.inputs = inputs
        self.writes = writes
        self.gradients = gradients

    def fresh_inputs(self) -> list[Tensor]:
        private = [self.writes or t.is_inference() for t in self.inputs]
        fresh = [t.detach().clone() if p else t.detach() for t, p in zip(self.inputs, private, strict=True)]
        for new, real in zip(fresh, self.inputs, strict=True):
            new.requires_grad_((self.gradients and new.is_floating_point()) or real.requires_grad)
        return [fresh[first] for first in self.capture.firsts]

    def fresh_state(self, tensor: Tensor, slot: StateSlot) -> Tensor:
        private = self.writes or slot.kind == "buffer" or tensor.is_inference()
        copy = tensor.detach().clone() if private else tensor.detach()
        return nn.Parameter(copy, tensor.requires_grad) if slot.kind == "parameter" else copy

    def run_model(self, model: nn.Module) -> Trial:
        """The eager model, on a copy of its module tree."""
        copy = ModelCopy(model, self.fresh_state)
        owners = {(slot.module, slot.name): new for slot, _, new in copy.state}
        state = [owners[slot.module, slot.name] for slot in self.capture.state]
        inputs = self.fresh_inputs()
        root = copy.root
        args, kwargs = _unflatten(self.capture, inputs)
        return self._run(lambda: type(root).forward(root, *args, **kwargs), state, inputs, model)

    def run_graph(self, run: Callable[..., Sequence[Any]], model: nn.Module) -> Trial:
        state = [self.fresh_state(slot.read(model), slot) for slot in self.capture.state]
        inputs = self.fresh_inputs()
        return self._run(lambda: run(*state, *inputs), state, inputs, model)

    def _run(self, call: Callable[[], Any], state: list[Tensor], inputs: list[Tensor], model: nn.Module) -> Trial:
        before = [t._version for t in (*state, *inputs)]
        try:
            with undisturbed(model, self.capture), torch.set_grad_enabled(self.gradients or torch.is_grad_enabled()):
                result = call()
        except Exception as error:
            if is_passing(error):
                raise
            return Trial(error=error)
        flat, structure = trees.flatten(result)
        values = {f"output {i}": leaf for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)}
        plain = {f"output {i}": leaf for i, leaf in enumerate(flat) if isinstance(leaf, (int, str))}
        outputs = list(values.values())
        names = [*map(str, self.capture.state), *(spec.name for spec in self.capture.inputs)]
        for name, tensor, version in zip(names, (*state, *inputs), before, strict=True):
            if tensor._version != version:
                values[f"{name} after the call"] = tensor.detach()
        if self.gradients:
            values.update(gradients(outputs, names, [*state, *inputs]))
        return Trial(values, plain, structure)


def gradients(outputs: Sequence[Tensor], names: Sequence[str], leaves: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """d(sum of cotangent * output) / d(leaf) by name, with the same random cotangents at every call."""
    outputs = [t for t in outputs if t.requires_grad]
    pairs = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if leaf is not None]
    wanted = {name: leaf for name, leaf in pairs if leaf.requires_grad and leaf.is_leaf}
    if not outputs or not wanted:
        return {}
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(t.shape, generator=generator).to(t) for t in outputs]
    found = torch.autograd.grad(outputs, list(wanted.values()), cotangents, allow_unused=True)
    dense = {name: grad for name, grad in zip(wanted, found, strict=True) if grad is not None}
    return {f"gradient of {name}": grad.to_dense() if grad.is_sparse else grad for name, grad in dense.items()}


def writes_declared(graph: fx.GraphModule) -> bool:
    """Whether an operator of the graph declares that it writes to an argument."""
    schemas = (getattr(node.target, "_schema", None) for node in graph.graph.nodes if node.op == "call_function")
    return any(schema is not None and schema.is_mutable for schema in schemas)


@contextlib.contextmanager
def undisturbed(model: nn.Module, capture: Capture) -> Iterator[None]:
    """The same random numbers at every trial, and the buffers of opaque submodules put back."""
    leaves = [model.get_submodule(leaf.path) for leaf in capture.leaves]
    buffers = [(b, b.detach().clone()) for leaf in leaves for b in leaf.buffers()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


def _unflatten(capture: Capture, tensors: Sequence[Tensor]) -> tuple[tuple, dict]:
    constants, rest = dict(capture.constants), iter(tensors)
    count = len(tensors) + len(constants)
    leaves = [constants[i] if i in constants else next(rest) for i in range(count)]
    return trees.unflatten(leaves, capture.in_spec)
