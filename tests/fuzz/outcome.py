"""What one call of a model gives and leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.torch_internals.seeds import seed_started
from tests.fuzz.placed import settled
from tests.fuzz.programs import Program, Sizes
from tests.fuzz.rounding import overlap


@dataclass
class Outcome:
    """What a call gave and left: tensors by name, and the exception."""

    values: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[Any, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    error: Exception | None = None


def outcome_of(
    model: nn.Module, inputs: Callable, sizes: Sizes, seed: int, program: Program, wide: bool = False
) -> Outcome:
    """One call on inputs of these sizes, what the caller does with a result, and the gradients of a fixed loss."""
    seed_started(seed)
    given = inputs(*sizes)
    if wide:
        given = tuple(_widened(t) for t in given)
    leaves = tuple(given)
    given = made_of(given, program.grad)
    for parameter in model.parameters():
        parameter.grad = None
    outcome = Outcome(inputs=given)
    try:
        result = model(*given)
        outcome.outputs = result if isinstance(result, tuple) else (result,)
        outcome.values = {f"output {i}": _frozen(leaf) for i, leaf in enumerate(outcome.outputs)}
        if program.grad:
            outcome.values.update(_between(outcome.outputs, program.nan))
        if program.edited in program.outputs:
            edited = outcome.outputs[program.outputs.index(program.edited)]
            outcome.values.update(_edited(outcome.outputs, edited, given if program.grad else ()))
        if program.grad:
            outcome.values.update(_gradients(model, leaves, outcome.outputs, program.nan))
        settled()
    except torch.AcceleratorError as error:
        return Outcome(error=error)
    except Exception as error:
        outcome.error = error
    outcome.values.update((name, _frozen(value)) for name, value in state_of(model))
    outcome.values.update((f"input {i} after the call", _frozen(t)) for i, t in enumerate(given))
    return outcome


def _widened(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor


def made_of(given: tuple[Tensor, ...], grad: bool) -> tuple[Tensor, ...]:
    """An edit in place of a leaf, or of a view of one, raises, so that forward gets what was computed from it."""
    return tuple(t.clone() if grad and t.requires_grad else t for t in given)


def _edited(outputs: tuple[Any, ...], result: Any, kept: Sequence[Tensor]) -> dict[str, Any]:
    """All outputs after the caller's edit of one: which of them share memory, and whether backward needs it.

    kept: what a graph may keep for backward where eager does not, a known limit.
    """
    floats = isinstance(result, Tensor) and result.is_floating_point()
    if floats and not any(overlap(result, tensor) for tensor in kept):
        result.detach().mul_(0.5)
    return {f"output {i} after an edit": _frozen(value) for i, value in enumerate(outputs)}


def _roots(outputs: tuple[Any, ...], nan: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that have gradients, and what comes in at each; nan: the first number of each is."""
    generator = torch.Generator("cpu").manual_seed(7)
    roots = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
    seeds = [torch.randint(-4, 5, t.shape, generator=generator, device="cpu").to(t) for t in roots]
    for seed in seeds:
        seed.view(-1)[: int(nan)] = torch.nan
    return roots, seeds


def _between(outputs: tuple[Any, ...], nan: bool) -> dict[str, Any]:
    """The gradient of all outputs in each, as hooks on it see it. Ahead of edits: one of a view takes its ways away."""
    roots, seeds = _roots(outputs, nan)
    if len(roots) < 2:
        return {}
    found = torch.autograd.grad(roots, roots, seeds, retain_graph=True)
    return {f"gradient of output {i}": grad for i, grad in enumerate(found)}


def _gradients(model: nn.Module, leaves: tuple[Tensor, ...], outputs: tuple[Any, ...], nan: bool) -> dict[str, Any]:
    roots, seeds = _roots(outputs, nan)
    if roots:
        torch.autograd.backward(roots, seeds)
    named = [*model.named_parameters(), *((f"input {i}", t) for i, t in enumerate(leaves) if t.requires_grad)]
    return {f"gradient of {name}": t.grad for name, t in named}


def state_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters, buffers, and plain attributes that hold tensors or numbers."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, (Tensor, int, float)) and name != "training":
                yield f"{path}.{name}", value


def _frozen(value: Any) -> Any:
    """A copy that later edits do not reach, with what its form was."""
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().clone(memory_format=torch.preserve_format)
    return copied.requires_grad_() if value.requires_grad and value.is_floating_point() else copied


def equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach(), b.detach()
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def short(value: object) -> str:
    return str(value).split("\n")[0][:200]
