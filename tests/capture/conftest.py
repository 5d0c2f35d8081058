"""Running a capture as the runtime does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

from fxopt.capture import Capture
from fxopt.torch_internals.seeds import seed_started


def run(found: Capture, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The captured graph on other inputs, with the model's state; fails when the guards do not hold."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    assert spec == found.in_spec
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    assert found.guards.holds(tensors), found.guards.describe()
    outputs = found.graph(*[slot.read(model) for slot in found.state], *tensors)
    return pytree.tree_unflatten(outputs, found.out_spec)


@pytest.fixture
def check():
    """Graph and eager agree, structure and numbers; both see the same random state."""

    def check(found: Capture, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        seed_started(0)
        want = model(*args, **kwargs)
        seed_started(0)
        got = run(found, model, *args, **kwargs)
        assert pytree.tree_structure(got) == pytree.tree_structure(want)
        for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
            if isinstance(b, torch.Tensor):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            else:
                assert a == b

    return check
