"""One run of a model or graph that leaves nothing behind: no mutated tensor, no random number, no gradient."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxopt import trees
from fxopt.autocast import Autocast
from fxopt.capture import LeafCall
from fxopt.capture.effects import stores_of
from fxopt.capture.errors import is_passing
from fxopt.capture.state import ModelCopy
from fxopt.capture.untouched import LARGE, Look, quietly
from fxopt.runtime.held import nothing_left_in
from fxopt.runtime.pieces import Pieces
from fxopt.runtime.undo import may_change
from fxopt.shape.aliases import Aliases
from fxopt.torch_internals.seeds import seed_started
from fxopt.tracebacks import let_go

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

    def keep_attributes(self, items: Iterable[tuple[str, Any]]) -> None:
        """Attributes that a forward has assigned are compared as outputs are."""
        for number, (name, value) in enumerate(items):
            for place, leaf in enumerate(trees.leaves(value)):
                kept: dict[str, Any] = self.values if isinstance(leaf, Tensor) else self.plain
                kept[f"attribute {name} ({number}, {place})"] = leaf


class Setting:
    """The tensors of one trial: of the state, the inputs and the modules that a run may write to it has copies.

    Args:
        graph: what was captured, which tells what a graph of it writes to.
        gradients: make every float tensor a leaf of its own, and differentiate.
    """

    def __init__(self, capture: Capture, inputs: Sequence[Tensor], gradients: bool) -> None:
        self.capture = capture
        self.inputs = inputs
        self.gradients = gradients
        self.names = [*map(str, capture.state), *(spec.name for spec in capture.inputs)]
        self.written = written_placeholders(capture.graph.graph)

    def run_model(self, model: nn.Module) -> Trial:
        """The eager model, on a copy of its module tree."""
        look = Look()
        copy = look.copy(model)
        owners = {(slot.module, slot.name): new for slot, _, new in copy.state}
        state = [owners[slot.module, slot.name] for slot in self.capture.state]
        inputs = self._leaves(map(look.own, self.inputs))
        args, kwargs = trees.with_constants(inputs, self.capture.constants, self.capture.in_spec)

        def after(tensor: Tensor, number: int) -> Tensor | None:
            if number not in self.written and (not look.writes(tensor) or torch.equal(look.value(tensor), tensor)):
                return None  # a check that would repair bad ids writes nothing where all are good
            return look.value(tensor)

        with look, Autocast(self.capture.autocast):
            trial = self._run(
                lambda: look.results(
                    trees.with_filled(
                        type(copy.root).forward(copy.root, *args, **kwargs), (args, kwargs), self.capture.filled
                    )
                ),
                [*state, *inputs],
                after,
                model,
            )
        if trial.error is None:
            trial.keep_attributes((s.name, getattr(copy.of(s.module), s.name)) for s in stores_of(self.capture.graph))
        return trial

    def run_graph(self, run: Callable[..., Sequence[Any]], model: nn.Module) -> Trial:
        with self.tensors(model) as tensors:

            def after(tensor: Tensor, number: int) -> Tensor | None:
                return tensor.detach() if number in self.written else None

            trial = self._run(lambda: run(*tensors), tensors, after, model)
            if trial.error is None:
                trial.keep_attributes((store.name, store.held) for store in stores_of(self.capture.graph))
            return trial

    @contextlib.contextmanager
    def tensors(self, model: nn.Module) -> Iterator[list[Tensor]]:
        """State and inputs for a graph, with copies of what it writes; opaque modules are copies meanwhile."""
        given = [*self.capture.state_of(model), *self.inputs]
        look = Look(large=0)
        for number in self.written:
            look.clone(given[number])
        private = map(look.own, given)
        with stand_ins(self.capture.graph, model):
            yield [*itertools.islice(private, len(self.capture.state)), *self._leaves(private)]

    def _leaves(self, inputs: Iterable[Tensor]) -> list[Tensor]:
        made = [t.requires_grad_() if self.gradients and t.is_floating_point() else t for t in inputs]
        return [made[first] for first in self.capture.firsts]

    def _run(
        self,
        call: Callable[[], Any],
        tensors: list[Tensor],
        after: Callable[[Tensor, int], Tensor | None],
        model: nn.Module,
    ) -> Trial:
        try:
            with undisturbed(model), torch.set_grad_enabled(self.gradients or torch.is_grad_enabled()):
                result = call()
        except Exception as error:
            if is_passing(error):
                raise
            let_go(error)
            return Trial(error=error)
        flat, structure = trees.flatten(result)
        values = {f"output {i}": leaf for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)}
        plain = {f"output {i}": leaf for i, leaf in enumerate(flat) if isinstance(leaf, (int, str))}
        outputs = list(values.values())
        for number, (name, tensor) in enumerate(zip(self.names, tensors, strict=True)):
            if (now := after(tensor, number)) is not None:
                values[f"{name} after the call"] = now
        if self.gradients:
            values.update(gradients(outputs, self.names, tensors))
        return Trial(values, plain, structure)


def gradients(outputs: Sequence[Tensor], names: Sequence[str], leaves: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """d(sum of cotangent * output) / d(leaf) by name, with the same random cotangents at every call."""
    outputs = [t for t in outputs if t.requires_grad]
    pairs = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if leaf is not None]
    wanted = {name: leaf for name, leaf in pairs if leaf.requires_grad and leaf.is_leaf}
    if not outputs or not wanted:
        return {}
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(t.shape, generator=generator, device="cpu").to(t) for t in outputs]
    found = torch.autograd.grad(outputs, list(wanted.values()), cotangents, allow_unused=True)
    dense = {name: grad for name, grad in zip(wanted, found, strict=True) if grad is not None}
    return {f"gradient of {name}": grad.to_dense() if grad.is_sparse else grad for name, grad in dense.items()}


def written_placeholders(graph: fx.Graph) -> list[int]:
    """The arguments of a graph, by number, whose memory it edits."""
    aliases = Aliases(graph)
    return [number for number, node in enumerate(graph.find_nodes(op="placeholder")) if aliases.edited(node)]


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """The same random numbers at every trial, nothing printed, nothing left where the model's code reaches."""
    with quietly(model):
        seed_started(0)
        yield


@contextlib.contextmanager
def stand_ins(graph: fx.GraphModule, model: nn.Module) -> Iterator[None]:
    """Copies of opaque modules, for all graphs that were made of `graph`."""
    calls = [module for module in graph.children() if isinstance(module, LeafCall)]
    constants = [getattr(graph, str(node.target)) for node in graph.graph.find_nodes(op="get_attr")] if calls else []
    look = Look()
    try:
        if calls:
            copy = look.copy(model)
            for call in calls:
                call.stand_in = _stand_in(call, copy, look, model, constants)
        yield
    finally:
        for call in calls:
            call.stand_in = None


def _stand_in(
    call: LeafCall, copy: ModelCopy, look: Look, model: nn.Module, constants: Sequence[Tensor]
) -> Callable[..., Any]:
    """A call of an opaque module's copy. Its optimized parts would not run under a mode."""
    signature, module = call.signature, copy.of(call.module)
    large = any(slot.read(model).untyped_storage().nbytes() > LARGE for slot in signature.state)
    if isinstance(call.pieces, Pieces) and not large:
        pieces = call.pieces.on(copy.of, {model.get_submodule(path) for path, _ in signature.touched})
        touched = may_change(call.module)

        def private(*args: Any, **kwargs: Any) -> Any:  # its optimized parts are the model's own
            with nothing_left_in(touched):
                return pieces(*args, **kwargs)

        return private

    def watched(*args: Any, **kwargs: Any) -> Any:
        if signature.edits:  # of the arguments, of which the graph has copies then
            look.adopt((args, kwargs), constants)
        with look:
            return module(*args, **kwargs)

    return watched
