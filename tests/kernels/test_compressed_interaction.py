"""fxopt::compressed_interaction: against einsum in fp64, on every instruction set; gradients and opcheck."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxopt.kernels import gradients
from fxopt.kernels.compressed_interaction import op

SIZES = [(0, 3, 3, 4, 5), (1, 1, 1, 1, 1), (5, 4, 3, 9, 10), (33, 6, 6, 17, 7), (2, 3, 4, 5, 200), (70, 13, 20, 8, 16)]


def exact(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum(
        "bhd,bmd,ohm->bod", x.double(), y.double(), weight.unflatten(1, (x.shape[1], y.shape[1])).double()
    )


class Defined(torch.autograd.Function):
    """The definition in PyTorch, which has any dtype, with the operator's gradients."""

    forward = staticmethod(op.compressed_interaction)
    setup_context = staticmethod(gradients.save_inputs)
    backward = staticmethod(op._backward)


def in_graph(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return op.OPERATORS.call_of("compressed_interaction")(x, y, weight)


@pytest.mark.parametrize("sizes", SIZES)
def test_is_einsum(isa: None, sizes: tuple[int, ...]) -> None:
    B, H, M, K, D = sizes
    x, y, weight = torch.randn(B, H, D), torch.randn(B, M, D), torch.randn(K, H * M)
    for call in (in_graph, torch.ops.fxopt.compressed_interaction, op.compressed_interaction):
        torch.testing.assert_close(call(x, y, weight).double(), exact(x, y, weight), rtol=1e-5, atol=1e-4)
    strided = torch.randn(D, B, H).permute(1, 2, 0), torch.randn(B, M + 1, 2 * D)[:, 1:, ::2]
    for dense in (weight, torch.randn(H * M, K).t()):
        torch.testing.assert_close(in_graph(*strided, dense).double(), exact(*strided, dense), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes", [*SIZES, (3, 0, 2, 4, 5), (3, 2, 2, 4, 0)])
def test_what_runs_on_a_gpu_is_einsum(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_CHUNK_ON_CUDA", 2000)
    B, H, M, K, D = sizes
    x, y, weight = torch.randn(D, B, H).permute(1, 2, 0), torch.randn(B, M, D), torch.randn(K, H * M)
    found = op._on_cuda(x, y, weight)
    torch.testing.assert_close(found.double(), exact(x, y, weight), rtol=1e-5, atol=1e-4)
    assert found.stride() == op._fake(x, y, weight).stride()


@pytest.mark.parametrize("rows", [1, 4, 200])
def test_a_set_with_itself(isa: None, rows: int) -> None:
    x, weight = torch.randn(rows, 7, 16), torch.randn(20, 49)
    torch.testing.assert_close(in_graph(x, x, weight).double(), exact(x, x, weight), rtol=1e-5, atol=1e-4)


def test_gradients_and_declarations() -> None:
    x, y, weight = (torch.randn(*shape, requires_grad=True) for shape in ((3, 4, 5), (3, 2, 5), (6, 8)))
    torch.library.opcheck(torch.ops.fxopt.compressed_interaction.default, (x, y, weight))
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, y, weight)]
    assert torch.autograd.gradcheck(Defined.apply, wide)
    assert torch.autograd.gradgradcheck(Defined.apply, wide)


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_gradients_by_chunks(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_CHUNK", 100)
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((rows, 4, 5), (rows, 2, 5), (6, 8))]
    seed = torch.randn(rows, 6, 5)
    found = torch.autograd.grad(in_graph(*leaves), leaves, seed)
    expected = torch.autograd.grad(exact(*leaves), leaves, seed.double())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_refuses_what_does_not_fit() -> None:
    if not op.OPERATORS.compiled():
        pytest.skip("no compiler")
    x = torch.randn(3, 4, 5)
    for y, weight in ((torch.randn(2, 4, 5), torch.randn(6, 16)), (x, torch.randn(6, 15)), (x[0], torch.randn(6, 16))):
        with pytest.raises(RuntimeError, match="compressed_interaction"):
            in_graph(x, y, weight)
