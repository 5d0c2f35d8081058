"""Random programs with views and in-place edits: normalized they are eager, bit for bit, memory and gradients too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fxopt.capture import CaptureError, capture
from fxopt.normalize import functional, normalize
from fxopt.rewrites.framework.direct import copied
from tests.normalize.programs import Program, inputs

PROGRAMS = 60


@dataclass
class Run:
    """All that a caller can see of one call."""

    outputs: list[Tensor]
    strides: list[tuple[int, ...]]
    shared: list[bool]
    inputs: list[Tensor]
    gradients: list[Tensor | None] | str


def observed(call: Callable[..., Sequence[Tensor]], table: Tensor, batch: int, grad: bool) -> Run:
    args = inputs(batch, seed=batch)
    table.grad = None
    with torch.set_grad_enabled(grad):
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


def differences(seed: int) -> list[str] | None:
    """What a caller sees of the normalized program but not of eager; None if the model does not run."""
    model = Program(seed)
    try:
        runs = {
            (batch, grad): observed(model, model.table, batch, grad) for batch in (5, 1, 0) for grad in (False, True)
        }
        captured = capture(model, inputs(5, seed=5))
    except (CaptureError, RuntimeError):
        return None
    state = [slot.read(model) for slot in captured.state]
    found = []
    for grad in (False, True):
        module = copied(captured.graph)
        normalize(module, inference=not grad)
        once = str(module.graph)
        normalize(module, inference=not grad)
        if str(module.graph) != once:
            found.append("not idempotent")
        module.graph.lint()
        module.recompile()
        for batch in (5, 1, 0):
            run = observed(lambda *args, call=module: call(*state, *args), model.table, batch, grad)
            found += [f"batch {batch}, {grad}: {text}" for text in unlike(run, runs[batch, grad])]
    return found


def unlike(found: Run, expected: Run) -> Iterator[str]:
    for name in ("outputs", "inputs"):
        if not all(map(torch.equal, getattr(found, name), getattr(expected, name))):
            yield f"other {name}"
    if found.shared != expected.shared:
        yield "outputs share other memory"
    if found.strides != expected.strides:
        yield f"strides {found.strides}, expected {expected.strides}"
    if not isinstance(expected.gradients, str) and not same_gradients(expected.gradients, found.gradients):
        yield f"gradients {found.gradients}, expected {expected.gradients}"


def test_normalized_programs_are_eager() -> None:
    found = {seed: differences(seed) for seed in range(PROGRAMS)}
    assert {seed: texts for seed, texts in found.items() if texts} == {}
    assert sum(texts == [] for texts in found.values()) > PROGRAMS // 2


def test_a_wrong_rule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional._Functional, "_is_private", lambda *_: True)
    assert any(differences(seed) for seed in range(20))
