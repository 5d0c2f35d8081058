"""C++ of ours still finds the tensor in a Python object, and knows which calls it may take."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxopt.kernels import entry
from fxopt.kernels.k_largest.op import OPERATORS
from fxopt.runtime import native
from fxopt.torch_internals.python_tensor import readable


def test_tensors_lie_as_the_header_says() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = entry._entry(), native.native()
    found = [module is not None and readable(module) for module in modules]
    assert found == [True, True], (
        "a tensor is not the first word behind THPVariable's head, or the header does not compile: without it calls go "
        "through the dispatcher, 1 us each, and signatures are checked in Python, 8 times slower"
    )


WATCHERS: dict[str, Callable[[], AbstractContextManager]] = {
    "a dispatch mode": TorchDispatchMode,
    "a function mode": TorchFunctionMode,
    "a profiler": lambda: torch.autograd.profiler.profile(use_cpu=True),
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_a_watched_call_goes_to_the_dispatcher(watcher: str) -> None:
    way, x, plan = OPERATORS.past_dispatcher("k_largest"), torch.randn(2, 6, 1), torch.tensor([2, 0])
    assert way(x, plan) is not None, "undisturbed() of python_call.h is never true: every call costs 1 us more"
    with WATCHERS[watcher]():
        found = way(x, plan)
    assert found is None, f"python_call.h does not notice {watcher}, which would not see our kernels"


def test_tensors_of_other_kinds_go_to_the_dispatcher() -> None:
    way, x, plan = OPERATORS.past_dispatcher("k_largest"), torch.randn(2, 6, 1), torch.tensor([2, 0])
    transformed: list[object] = []
    torch.vmap(lambda each: transformed.append(way(each, plan)) or each)(x[None])
    others = [x.requires_grad_(), x.detach().to_sparse(), x.detach().to(torch.complex64).conj()]
    assert [*transformed, *(way(other, plan) for other in others)] == [None] * 4, (
        "dispatch keys have changed: kPlain of python_call.h lets tensors through that kernels cannot read"
    )
