"""What runs around the steps of optimizers."""

from __future__ import annotations

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fxopt.torch_internals import optimizer_steps
from fxopt.torch_internals.optimizer_steps import after_fused_steps, is_watched


def test_hooks_around_a_step_are_seen() -> None:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    assert not is_watched(optimizer)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    assert is_watched(optimizer)
    handle.remove()
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    assert is_watched(optimizer)
    handle.remove()
    handle = register_optimizer_step_post_hook(lambda *_: None)
    assert is_watched(optimizer)
    handle.remove()
    assert not is_watched(optimizer)


def test_fused_steps_are_heard_of_and_no_hooks_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[torch.Tensor] = []
    after_fused_steps(heard.append)
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.ones(2)
    fused, plain = (torch.optim.Adam([w], fused=f) for w, f in zip(weights, (True, False), strict=True))
    fused.step(), plain.step()
    assert len(heard) == 1 and heard[0] is weights[0], "a step with fused=True is not told to the hooks behind it"
    assert not is_watched(fused)
    optimizer_steps._hear.remove(heard.append)
