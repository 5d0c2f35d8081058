"""Each function that a trace changes is still asked by torch, and by this thread alone is another one met."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from fxopt.torch_internals import patches
from fxopt.torch_internals.fake_tensors import FakeTensorMode
from fxopt.torch_internals.scripted import scripted_as_written
from fxopt.torch_internals.shape_env import TraceShapeEnv
from fxopt.torch_internals.symbols import expression
from fxopt.torch_internals.tracing import make_fx


class Stopped(Exception):
    pass


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Callable[[patches.Change], None]:
    return lambda change: monkeypatch.setattr(*change)


def elsewhere(run: Callable[[], Any]) -> Any:
    """What another thread gets."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()
    thread.join()
    return results[0]


def has_meta() -> bool:
    graph = make_fx(torch.neg)(torch.ones(2)).graph
    return any(node.meta.get("tensor_meta") is not None for node in graph.nodes)


def test_no_tensor_meta(changed: Any) -> None:
    changed(patches.no_tensor_meta())
    assert not has_meta(), "_extract_tensor_metadata is not asked: 40% of a trace goes into what nobody reads"
    assert elsewhere(has_meta), "another thread's make_fx has no tensor_meta while fxopt traces"


@pytest.mark.usefixtures("recording")
def test_contiguous_is_not_asked(changed: Any, environment: TraceShapeEnv, tracer: Any, x: Tensor) -> None:
    changed(patches.contiguous_unasked())
    with FakeTensorMode() as other:
        theirs = other.from_tensor(torch.ones(2, 3))
    assert theirs.contiguous() is theirs, "the fake tensors of others are made contiguous otherwise"
    known = len(environment.guards)
    x.contiguous()
    assert [node for node in tracer.graph.nodes if node.target is torch.ops.aten.contiguous.default], (
        "FakeTensor.contiguous() reaches no mode: a capture would take x for contiguous, and guard on a size of 1"
    )
    assert len(environment.guards) == known


def test_overlaps_are_not_asked(changed: Any, environment: TraceShapeEnv, x: Tensor) -> None:
    changed(patches.overlap_unasked())
    known = len(environment.guards)
    assert torch._debug_has_internal_overlap(x) == 2 and len(environment.guards) == known, (
        "_debug_has_internal_overlap: x[:, 1:] = y would guard on no rows and on one"
    )
    assert torch._debug_has_internal_overlap(torch.ones(1).expand(3)) == 1
    with FakeTensorMode():
        theirs = torch.empty(3)
    assert elsewhere(lambda: torch._debug_has_internal_overlap(theirs)) == 0, "another thread gets fxopt's answer"


def test_exact_quotients_are_not_simplified(
    changed: Any, environment: TraceShapeEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    def simplify(term: Any) -> Any:
        raise Stopped

    monkeypatch.setattr(sympy, "simplify", simplify)
    rows, length = (environment.size(name, 6, positive=False) for name in "xy")
    kept = torch.sym_max(0, (length - 4) // 2) + 4
    with pytest.raises(Stopped):
        rows * kept * 32 // (rows * 8)
    changed(patches.exact_quotients())
    for product in (rows * kept * 32, kept * 32 * rows):
        quotient: Any = product // (rows * 8)
        assert expression(quotient) == expression(kept * 4), "FloorDiv.eval: each such quotient takes 0.3 s"
    with pytest.raises(Stopped):
        rows * kept * 32 // (rows * 64)

    def theirs() -> bool:
        with pytest.raises(Stopped):
            rows * kept * 96 // (rows * 8)
        return True

    assert elsewhere(theirs), "another thread gets fxopt's answer"


def test_hooks_around_what_is_saved_are_refused(changed: Any) -> None:
    changed(patches.no_saving_hooks(Stopped))
    identity = lambda tensor: tensor  # noqa: E731

    def saved() -> float:
        x = torch.ones(2, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(identity, identity):
            return x.sin().sum().item()

    for hooks in (torch.autograd.graph.saved_tensors_hooks(identity, identity), torch.autograd.graph.save_on_cpu()):
        with pytest.raises(Stopped), hooks:
            pass
    with torch.no_grad():
        saved()
    assert elsewhere(saved) > 0, "another thread may not save by hooks"
    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()


KEPT = Twice.apply  # as models write it beside the class


@pytest.mark.parametrize("apply", [lambda x: Twice.apply(x), KEPT], ids=["looked up", "kept"])
def test_functions_are_called_otherwise(apply: Callable, changed: Any) -> None:
    changed(patches.autograd_functions(lambda kind, own, x: (kind, own(x)), reentrant=apply))
    kind, twice = apply(torch.ones(2))
    assert kind is Twice and twice.tolist() == [2, 2], "Function.apply no longer asks its base class for apply"
    with torch.no_grad():
        assert apply(torch.ones(2)).tolist() == [2, 2]
    assert elsewhere(lambda: apply(torch.ones(2)).tolist()) == [2, 2]


def test_seeds_are_refused(changed: Any) -> None:
    changed(patches.no_seeds(Stopped))
    for seed in (lambda: torch.manual_seed(3), torch.seed, lambda: torch.set_rng_state(torch.get_rng_state())):
        with pytest.raises(Stopped):
            seed()
    assert elsewhere(lambda: torch.manual_seed(3).initial_seed()) == 3


def test_len_is_a_size(changed: Any, environment: TraceShapeEnv, x: Tensor) -> None:
    changed(patches.symbolic_len(environment))
    assert isinstance(len(x), torch.SymInt) and environment.gave_len, "builtins.len fixes the batch of a capture"
    with FakeTensorMode():
        theirs = torch.empty(3)
    assert elsewhere(lambda: type(len(theirs))) is int, "another thread's len() of a fake tensor is no int"
    environment.symbolic_len = False
    assert len(torch.ones(3)) == len([1, 2, 3]) == 3 and type(len(x)) is int


@torch.jit.script
def scripted(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    return x.sin() * factor if x.dim() == 1 else x


def test_scripted_functions_run_as_they_were_written(changed: Any) -> None:
    traced = torch.jit.trace(lambda x: x * 2, torch.ones(2))
    for change in scripted_as_written(Stopped):
        changed(change)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripted, "_torchdynamo_inline", lambda *args, **kwargs: seen.append((args, kwargs)))
        scripted(torch.ones(2), factor=3.0)
    assert len(seen) == 1, "torch.jit.ScriptFunction.__call__ is not what a call of a scripted function calls"
    assert scripted(torch.zeros(2)).tolist() == [0, 0] and elsewhere(lambda: scripted(torch.zeros(2)).tolist()) == [
        0,
        0,
    ]
    with pytest.raises(Stopped):
        traced(torch.ones(2))
    assert elsewhere(lambda: traced(torch.ones(2)).tolist()) == [2, 2]
