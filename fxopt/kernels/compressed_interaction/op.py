"""fxopt::compressed_interaction: linear maps of all products of two sets of vectors, which are never written out.

The layer of xDeepFM's compressed interaction network (Lian et al., arXiv:1803.05170), which frameworks write as an
outer product [B, H, M, D] and a convolution with kernels of size 1. At batch 256, D = 16, 26 fields, 256 and 128
maps, one core: 98 ms so, 24 ms by this kernel. CUDA has a kernel of its own (cuda/compress.cu), which makes the
products in registers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import cuda_call, gradients
from ..operators import BY_ROWS, Operator, Operators, cpu_library
from .cuda import compress

_SCHEMA = "compressed_interaction(Tensor x, Tensor y, Tensor weight) -> Tensor"
_GPU_SCHEMA = "gpu_compressed_interaction(Tensor x, Tensor y, Tensor weight, Tensor? bias, bool relu) -> Tensor"
KERNEL = cpu_library(Path(__file__).parent, "layout.h", "compress.h", (_SCHEMA,))
_CHUNK = 1 << 20  # products at a time, in PyTorch
_CHUNK_ON_CUDA = 1 << 24  # 64 MB of them


def compressed_interaction(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """einsum("bhd,bmd,ohm->bod"). The kernel's own definition, a few rows at a time.

    Args:
        x: [B, H, D]. y: [B, M, D]. weight: [O, H * M].

    Returns:
        [B, O, D], contiguous.
    """
    rows = max(1, _CHUNK // max(1, weight.shape[1] * x.shape[2]))
    chunks = zip(x.split(rows), y.split(rows), strict=True)
    return torch.cat([torch.matmul(weight, _products(*chunk).transpose(1, 2)) for chunk in chunks])


def _products(x: Tensor, y: Tensor) -> Tensor:
    """x_h * y_m: [B, D, H * M]."""
    x, y = x.transpose(1, 2).contiguous(), y.transpose(1, 2).contiguous()
    return (x.unsqueeze(3) * y.unsqueeze(2)).flatten(2)


def _on_cuda(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The same in TF32 where torch lets convolutions: by a kernel that stores no product, or else by cuDNN."""
    kernel = compress.loaded(x, y, weight)
    return _by_cudnn(x, y, weight) if kernel is None else compress.compressed(kernel, x, y, weight)


def gpu_compressed_interaction(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """The same on CUDA with a `bias` [O] and ReLU, for tensors that record no gradients."""
    kernel = compress.loaded(x, y, weight)
    beside = bias is None or (cuda_call.alike((x, bias)) and bias.is_contiguous() and len(bias) == len(weight))
    if kernel is not None and beside:
        return compress.compressed(kernel, x, y, weight, bias, relu)
    return _ended(_on_cuda(x, y, weight), bias, relu)


def _ended(value: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    value = value if bias is None else value.add_(bias.unsqueeze(1))
    return value.relu_() if relu else value


def _reference(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    return _ended(compressed_interaction(x, y, weight), bias, relu)


def _by_cudnn(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Products are written over channels that lie side by side, as in a GEMM.

    [256, 3328, 16] to 128 channels takes 82 us where the channels lie apart, and 31 so (one H100).
    """
    B, channels = x.shape[0], weight.shape[1]
    value, kernel = x.new_empty((B, weight.shape[0], x.shape[2])), weight[:, :, None, None]
    if not value.numel() or not channels:
        return value.zero_()
    rows = max(1, _CHUNK_ON_CUDA // (channels * x.shape[2]))
    for first in range(0, B, rows):
        products = _products(x[first : first + rows], y[first : first + rows])
        images = products.unsqueeze(1).permute(0, 3, 1, 2)  # [B, C, 1, D]
        value[first : first + rows] = torch.conv2d(images, kernel).squeeze(2)
    return value


def _fake(x: Tensor, y: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0], x.shape[2]))


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of x and y are compressed interactions themselves, of grad and the other of the two.

    At batch 256 (see above) they take 42 ms, where GEMMs for the gradient of the products took 95.
    """
    if gradients.by_definition([grad]):
        return tuple(gradients.again(lambda *given: [compressed_interaction(*given)], ctx.saved_tensors, [grad]))
    x, y, weight = ctx.saved_tensors
    cube, needs = weight.unflatten(1, (x.shape[1], y.shape[1])), ctx.needs_input_grad
    apply = torch.ops.fxopt.compressed_interaction if grad.dtype == torch.float32 else compressed_interaction
    return (
        apply(grad, y, cube.permute(1, 0, 2).flatten(1)) if needs[0] else None,
        apply(grad, x, cube.permute(2, 0, 1).flatten(1)) if needs[1] else None,
        _of_weight(grad, x, y) if needs[2] else None,
    )


def _of_weight(grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """[O, H * M]. The products are made again, as many columns at a time as stay in the cache."""
    wide, left, right = (tensor.transpose(0, 1).flatten(1) for tensor in (grad, x, y))
    columns = max(1, _CHUNK // max(1, left.shape[0] * right.shape[0]))
    total = grad.new_zeros(wide.shape[0], left.shape[0] * right.shape[0])
    for g, u, v in zip(*(side.split(columns, 1) for side in (wide, left, right)), strict=True):
        total = torch.addmm(total, g, (u.unsqueeze(1) * v).flatten(0, 1).t())
    return total


OPERATORS = Operators(
    (
        Operator(
            _SCHEMA, compressed_interaction, _fake, _backward, gradients.save_inputs, {"CUDA": _on_cuda}, facts=BY_ROWS
        ),
        Operator(_GPU_SCHEMA, _reference, _fake, facts=BY_ROWS),
    ),
    KERNEL,
    compress.KERNEL,
)
