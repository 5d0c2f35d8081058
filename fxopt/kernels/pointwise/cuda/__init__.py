"""fxopt::pointwise on CUDA: a kernel for each plan, generated when it is first asked for, without gradients."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from fxopt.torch_internals.symbols import traced_sizes

from ... import cuda_build, cuda_call
from ...cuda_generated import GeneratedKernel
from .. import reference
from ..encode import plan_of
from . import source
from .geometry import THREADS, divisor, geometry_of, is_wide, scheduled, sizes_of
from .held import held_by_lanes
from .writer import TYPES


def pointwise_on_cuda(inputs: Sequence[Tensor], plan: str) -> list[Tensor]:
    """Every output of a plan, each contiguous; by PyTorch where the kernel cannot be had, or gradients are recorded.

    Args:
        inputs: tensors of one GPU, float32, bool, uint8, int32 or int64, of any strides.
        plan: :func:`..encode.text` of a :class:`..plan.Plan`.

    Raises:
        RuntimeError: inputs that do not fit the plan.
    """
    decoded = plan_of(plan)
    sizes = sizes_of(inputs, decoded)
    divided, wide = geometry_of(plan, sizes), is_wide(inputs, sizes)
    device = inputs[0].get_device()
    fits = divided.fits and _are_served(inputs)
    kernel = cuda_build.loaded(generated(plan, _dtypes(inputs), wide, divided.held), device) if fits else None
    if kernel is None:
        return reference.pointwise(inputs, decoded)
    outputs = reference.empty_outputs(inputs, decoded, sizes)
    if divided.blocks:
        words = parameters(inputs, outputs, plan, sizes, wide)
        launched = functools.partial(kernel.launch, divided.blocks, THREADS, 4 * divided.kept, words)
        cuda_call.on_stream(launched, device)
    return outputs


def _are_served(inputs: Sequence[Tensor]) -> bool:
    device = inputs[0].device
    if device.type != "cuda" or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
        return False
    return all(tensor.device == device and tensor.dtype in TYPES for tensor in inputs)


def _dtypes(inputs: Sequence[Tensor]) -> tuple[torch.dtype, ...]:
    return tuple(tensor.dtype for tensor in inputs)


@functools.lru_cache(maxsize=4096)
def generated(
    plan: str, dtypes: tuple[torch.dtype, ...], wide: bool = False, held: tuple[int, int] = (0, 0)
) -> GeneratedKernel:
    """The kernel of a plan for inputs of these dtypes; `wide` where 32 bits do not count their elements, and `held` as
    :class:`.geometry.Geometry` says of their sizes."""
    return GeneratedKernel("fxopt_pointwise", source.source(scheduled(plan), dtypes, wide, held), source.KERNEL)


def parameters(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], plan: str, sizes: tuple[int, ...], wide: bool
) -> bytes:
    """The kernel's Call, in the order of :func:`.source.parameters`."""
    made, divided = scheduled(plan), geometry_of(plan, sizes)
    pointers = [tensor.data_ptr() for tensor in (*inputs, *outputs)]
    strides = [
        stride
        for tensor, given in zip(inputs, made.plan.inputs, strict=True)
        for stride, axis in zip(tensor.stride(), given.dims, strict=True)
        if axis is not None
    ]
    indices = (divided.rows, divided.block_rows, *sizes, *strides)
    magics, shifts = zip(*map(divisor, sizes), strict=True)
    numbers = (*divided.lanes, *divided.places)
    words = f"<{len(pointers)}Q{len(indices)}{'q' if wide else 'i'}{2 * len(sizes)}I{len(numbers)}i"
    packed = struct.pack(words, *pointers, *indices, *magics, *shifts, *numbers)
    return packed + bytes(-len(packed) % 8)  # a struct's size is a multiple of its widest field's


def kernel_of(plan: str, traced: Sequence[Tensor]) -> GeneratedKernel:
    """What a call will need of a plan, as far as inputs of a trace tell: at the sizes that were captured."""
    sizes = [0] * scheduled(plan).plan.axes
    for value, given in zip(traced, scheduled(plan).plan.inputs, strict=True):
        for size, axis in zip(traced_sizes(value.shape, unknown=0), given.dims, strict=True):
            if axis is not None:
                sizes[axis] = size
    held = held_by_lanes(scheduled(plan), sizes)
    return generated(plan, _dtypes(traced), held=held)
