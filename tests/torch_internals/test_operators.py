"""The dispatcher's tables, and operators that have no public name."""

from __future__ import annotations

import types

import torch
import torch.nn.functional as F
from torch.nn.utils import rnn
from torch.overrides import TorchFunctionMode

from fxopt.torch_internals.operators import (
    OPERATORS,
    addmm_activation,
    below_autograd,
    destroy,
    foreach_zero_,
    has_kernel,
    nn_bindings,
    pack_padded_sequence,
    pad_packed_sequence,
    redispatched,
    softmax_backward,
)


def test_nothing_is_recorded_below_autograd() -> None:
    with below_autograd():
        y = torch.ones(2, requires_grad=True) * 2
    assert not y.requires_grad, "_AutoDispatchBelowAutograd: fxopt/kernels/towers/op.py would record its forward twice"


def test_operators_are_known_by_their_class() -> None:
    for operator in (torch.ops.aten.relu, torch.ops.aten.relu.default, torch.ops.higher_order.cond):
        assert isinstance(operator, OPERATORS), (
            "torch._ops: fxopt/runtime/inside.py would watch what torch caches there"
        )


def test_sequences_are_packed_by_these_functions() -> None:
    x, lengths = torch.rand(2, 3, 4), torch.tensor([3, 1])
    called: list[object] = []

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            called.append(func)
            return func(*args, **(kwargs or {}))

    with Calls():
        rnn.pad_packed_sequence(rnn.pack_padded_sequence(x, lengths, batch_first=True))
    assert pack_padded_sequence in called and pad_packed_sequence in called, (
        "torch.nn.utils.rnn calls other functions: fxopt/capture/packed_sequences.py records these"
    )


def test_kernels_are_known_by_device() -> None:
    assert has_kernel("aten::add.Tensor", "CPU") and not has_kernel("aten::_cudnn_init_dropout_state", "CPU"), (
        "_dispatch_has_kernel_for_dispatch_key: fxopt/kernels/columns/autograd.py chooses the backward by it"
    )


def test_a_library_takes_back_what_it_defined() -> None:
    library = torch.library.Library("fxopt_test_of_internals", "FRAGMENT")
    library.define("short_lived(Tensor x) -> Tensor")
    destroy(library)
    again = torch.library.Library("fxopt_test_of_internals", "FRAGMENT")
    again.define("short_lived(Tensor x, Tensor y) -> Tensor")  # raises where the first one is still there
    destroy(again)


def test_bindings_are_in_c() -> None:
    found = [type(getattr(nn_bindings, name)) for name in ("linear", "gelu", "silu", "leaky_relu")]
    assert found == [types.BuiltinFunctionType] * 4, (
        "torch._C._nn holds Python functions: fxopt/rewrites/framework/direct.py would go to them for speed"
    )


def test_operators_without_a_public_name() -> None:
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    activated = addmm_activation(bias, x, weight.t())
    assert torch.allclose(activated, F.linear(x, weight, bias).relu(), atol=1e-6), (
        "_addmm_activation is no linear layer with ReLU: fxopt/kernels/mlp/cuda/linear.py"
    )
    y, grad = x.clone().requires_grad_(), torch.ones(3, 4).cumsum(1)
    weights = y.softmax(-1)
    weights.backward(grad)
    found = softmax_backward(grad, weights.detach(), -1, torch.float32)
    assert y.grad is not None and torch.allclose(found, y.grad), (
        "_softmax_backward_data: fxopt/kernels/attention/op.py differentiates by it"
    )
    foreach_zero_([x])
    assert not x.any()


def test_kernels_of_a_key_are_called_by_themselves() -> None:
    x = torch.randn(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = redispatched(torch.ops.aten.mm.default, "AutocastCPU")(x, x)
    assert found.dtype == torch.bfloat16, "the autocast kernel of mm casts nothing: fxopt/capture/casts.py"
    assert not has_kernel("aten::add.Tensor", "AutocastCPU"), "add is cast on the CPU: fxopt/capture/casts.py"
