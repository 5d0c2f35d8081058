"""Autograd's hooks, keys and switches that no documentation mentions."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fxopt.torch_internals.autograd import (
    StopRecomputation,
    at_the_end_of_backward,
    checkpoint_of,
    hooks_of,
    hooks_on_saved_tensors,
    making_no_views,
    running_backward,
    saving_as_usual,
    set_grad_enabled,
)
from fxopt.torch_internals.tracing import make_fx


def test_hooks_on_saved_tensors_are_lifted_for_a_while() -> None:
    saved: list[torch.Tensor] = []
    x = torch.ones(2, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        with saving_as_usual():
            x.exp()
        assert not saved, "_pop_saved_tensors_default_hooks: torch.utils.checkpoint miscounts what a capture saves"
        x.exp()
    assert len(saved) == 1, "_push_saved_tensors_default_hooks: the caller's hooks are gone after a call of fxopt"


def test_hooks_on_saved_tensors_are_seen() -> None:
    seen = []
    checkpoint(lambda x: seen.append(hooks_on_saved_tensors()) or x.exp(), torch.ones(2), use_reentrant=False)
    assert hooks_on_saved_tensors() is None and seen[0] is not None, (
        "_top_saved_tensors_default_hooks: a checkpoint around a part would be lost (fxopt/runtime/sharded/trace.py)"
    )


def test_hooks_on_tensors_are_seen() -> None:
    x = torch.ones(2, requires_grad=True)
    before = bool(hooks_of(x))
    x.register_hook(lambda grad: grad)
    assert (before, bool(hooks_of(x))) == (False, True), (
        "Tensor._backward_hooks: a hook on a table would see a sparse gradient (fxopt/kernels/columns/row_gradients.py)"
    )


def test_a_backward_has_a_number_and_an_end() -> None:
    seen: list[object] = []
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    for leaf in (x, y):
        leaf.register_post_accumulate_grad_hook(lambda leaf: seen.append(running_backward()))
    x.register_post_accumulate_grad_hook(lambda leaf: at_the_end_of_backward(lambda: seen.append("end")))
    (x * y).sum().backward()
    first, second, end = seen
    assert first == second != running_backward() == -1 and end == "end", (
        "_current_graph_task_id or queue_callback: optimizers in backward do not find what belongs to one backward"
    )


def test_a_failed_backward_drops_what_waits_for_its_end() -> None:
    seen: list[object] = []
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))

    def fail(grad: torch.Tensor) -> torch.Tensor:
        raise ValueError

    late = y * 2
    late.register_hook(fail)
    x.register_post_accumulate_grad_hook(lambda leaf: at_the_end_of_backward(lambda: seen.append("end")))
    with pytest.raises(ValueError):
        (late.exp() * x).sum().backward()
    assert not seen, "queue_callback: rows of a backward that failed would be updated"


def test_switches_of_gradients_are_recorded() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return x * 2

    traced = make_fx(function, pre_dispatch=True)(torch.ones(2))
    assert traced.graph.find_nodes(op="call_function", target=set_grad_enabled), (
        "torch.no_grad() is no call of _set_grad_enabled in a graph: fxopt/normalize/gradients.py reads it as one"
    )


def test_a_checkpoint_stops_with_its_own_error() -> None:
    raised: list[type] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        try:
            return (x.exp() * 2).sin()
        except BaseException as error:
            raised.append(type(error))
            raise

    x = torch.ones(2, requires_grad=True)
    checkpoint(function, x, use_reentrant=False).sum().backward()
    assert raised == [StopRecomputation], (
        f"a checkpoint stops its recomputation by {raised}: fxopt/runtime/dispatch.py would take it for a wrong graph"
    )


def test_views_that_are_no_views() -> None:
    x = torch.ones(2, 3)
    with making_no_views():
        view = x.t()
    assert not view._is_view() and x.t()._is_view(), (
        "_AutoDispatchBelowADInplaceOrView: who edits a result of fxopt's operators in place is told that it is a view"
    )


def test_a_checkpoint_is_known_by_its_frame() -> None:
    seen = []

    def run(x: torch.Tensor) -> torch.Tensor:
        hooks = hooks_on_saved_tensors()
        seen.append(hooks and checkpoint_of(hooks))
        return x.exp()

    y = checkpoint(run, torch.ones(2, requires_grad=True), use_reentrant=False).sum()
    for _ in range(2):
        y.backward(retain_graph=True)
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        run(torch.ones(2))
    *known, other = seen
    assert other is None and len(known) == 3 and None not in known and len({id(each.frame) for each in known}) == 1, (
        "_checkpoint_hook, _recomputation_hook: a recomputation may run another side than its forward did"
    )
    assert known[0].recomputation is None and len({each.recomputation for each in known}) == 3, (
        "_recomputation_hook: two recomputations are taken for one (fxopt/runtime/recomputed.py)"
    )
