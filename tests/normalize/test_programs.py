"""Random programs with views and in-place edits: normalized they are eager, bit for bit, memory and gradients too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fxopt.capture import CaptureError, capture
from fxopt.normalize import functional, normalize
from tests.normalize.programs import Program, inputs

PROGRAMS = 150


@dataclass
class Run:
    """All that a caller can see of one call."""

    outputs: list[Tensor]
    strides: list[tuple[int, ...]]
    shared: list[bool]
    inputs: list[Tensor]
    gradients: list[Tensor | None] | str


def observed(call: Callable[..., Sequence[Tensor]], table: Tensor, batch: int) -> Run:
    args = inputs(batch, seed=batch)
    table.grad = None
    outputs = list(call(*args))
    memory = [tensor.untyped_storage().data_ptr() for tensor in (*outputs, *args, table)]
    shared = [left == right != 0 for left, right in itertools.combinations(memory, 2)]
    gradients: list[Tensor | None] | str = [None]
    differentiable = [output for output in outputs if output.requires_grad]
    if differentiable:
        try:
            torch.autograd.backward([(output * output).sum() for output in differentiable])
            gradients = [None if table.grad is None else table.grad.clone()]
        except RuntimeError as error:
            gradients = str(error)  # edited after it was saved: eager's own affair
    strides = [output.stride() for output in outputs] if batch > 1 else []  # of axes of 1 they say nothing
    return Run([output.detach().clone() for output in outputs], strides, shared, list(args), gradients)


def same_gradients(expected: list[Tensor | None], found: list[Tensor | None] | str) -> bool:
    if isinstance(found, str):
        return False
    pairs = zip(expected, found, strict=True)
    return all(left is right if left is None or right is None else torch.equal(left, right) for left, right in pairs)


def difference(seed: int, grad: bool) -> str | None:
    """What a caller sees of the normalized program but not of eager: "" nothing, None if the model does not run."""
    model = Program(seed)
    with torch.set_grad_enabled(grad):
        try:
            expected = {batch: observed(model, model.table, batch) for batch in (5, 1, 0)}
        except RuntimeError:
            return None
        try:
            captured = capture(model, inputs(5, seed=5))
        except CaptureError:
            return None
        module = captured.graph
        normalize(module, inference=not grad)
        once = str(module.graph)
        normalize(module, inference=not grad)
        if str(module.graph) != once:
            return "not idempotent"
        module.graph.lint()
        module.recompile()
        state = [slot.read(model) for slot in captured.state]
        for batch, run in expected.items():
            found = observed(lambda *args: module(*state, *args), model.table, batch)
            for name in ("outputs", "inputs"):
                if not all(map(torch.equal, getattr(found, name), getattr(run, name))):
                    return f"batch {batch}: other {name}"
            if found.shared != run.shared:
                return f"batch {batch}: outputs share other memory"
            if found.strides != run.strides:
                return f"batch {batch}: other strides, {found.strides} for {run.strides}"
            if not isinstance(run.gradients, str) and not same_gradients(run.gradients, found.gradients):
                return f"batch {batch}: {found.gradients}, expected {run.gradients}"
    return ""


@pytest.mark.parametrize("grad", [False, True])
def test_normalized_programs_are_eager(grad: bool) -> None:
    found = {seed: difference(seed, grad) for seed in range(PROGRAMS)}
    assert {seed: text for seed, text in found.items() if text} == {}
    assert sum(text == "" for text in found.values()) > PROGRAMS // 3


def test_a_wrong_rule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional._Functional, "_is_private", lambda *_: True)
    assert any(difference(seed, grad=False) for seed in range(40))
