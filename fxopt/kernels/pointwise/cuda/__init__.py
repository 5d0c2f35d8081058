"""fxopt::pointwise on CUDA: a kernel for each plan, generated when it is first asked for, without gradients.

fxopt::gpu_grouped_pointwise is calls of one plan, which need not wait for each other, as one launch.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from fxopt.facts import Facts
from fxopt.torch_internals.symbols import traced_sizes

from ... import cuda_build, cuda_call
from ...cuda_generated import GeneratedKernel
from ...operators import Operator, Operators
from .. import reference
from ..encode import plan_of
from . import source
from .geometry import THREADS, divisor, geometry_of, is_wide, launch_of, scheduled, sizes_of
from .held import held_by_lanes
from .writer import TYPES


def pointwise_on_cuda(inputs: Sequence[Tensor], plan: str) -> list[Tensor]:
    """Every output of a plan, each contiguous; by PyTorch where the kernel cannot be had, or gradients are recorded.

    Args:
        inputs: tensors of one GPU, float32, bool, uint8, int32 or int64, of any strides: those of one call of the plan,
            or of several calls behind each other, which are one launch.
        plan: :func:`..encode.text` of a :class:`..plan.Plan`.

    Returns:
        The outputs of each call, behind each other.

    Raises:
        RuntimeError: inputs that do not fit the plan.
    """
    decoded = plan_of(plan)
    calls = reference.calls_of(inputs, decoded)
    sizes = tuple([sizes_of(call, decoded) for call in calls])
    launch, wide = launch_of(plan, sizes), any(map(is_wide, calls, sizes))
    device = inputs[0].get_device()
    kernel = None
    if launch.fits and _are_served(inputs):
        kernel = cuda_build.loaded(generated(plan, _dtypes(calls[0]), wide, launch.held, len(calls)), device)
    if kernel is None:
        return reference.of_calls(inputs, decoded)
    outputs = [reference.empty_outputs(call, decoded, of_call) for call, of_call in zip(calls, sizes, strict=True)]
    if blocks := sum(launch.blocks):
        words = parameters(calls, outputs, plan, sizes, wide)
        cuda_call.on_stream(functools.partial(kernel.launch, blocks, THREADS, 4 * launch.kept, words), device)
    return list(itertools.chain.from_iterable(outputs))


def _are_served(inputs: Sequence[Tensor]) -> bool:
    device = inputs[0].device
    if device.type != "cuda" or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
        return False
    return all(tensor.device == device and tensor.dtype in TYPES for tensor in inputs)


def _dtypes(inputs: Sequence[Tensor]) -> tuple[torch.dtype, ...]:
    return tuple(tensor.dtype for tensor in inputs)


@functools.lru_cache(maxsize=4096)
def generated(
    plan: str, dtypes: tuple[torch.dtype, ...], wide: bool = False, held: tuple[int, int] = (0, 0), calls: int = 1
) -> GeneratedKernel:
    """The kernel of a plan for inputs of these dtypes, for so many calls; `wide` where 32 bits do not count their
    elements, and `held` as :class:`.geometry.Geometry` says of their sizes."""
    return GeneratedKernel("fxopt_pointwise", source.source(scheduled(plan), dtypes, wide, held, calls), source.KERNEL)


def parameters(
    calls: Sequence[Sequence[Tensor]],
    outputs: Sequence[Sequence[Tensor]],
    plan: str,
    sizes: tuple[tuple[int, ...], ...],
    wide: bool,
) -> bytes:
    """The kernel's Calls, a Call in the order of :func:`.source.parameters`."""
    blocks = launch_of(plan, sizes).blocks
    words = [_padded(struct.pack(f"<{len(blocks)}{'q' if wide else 'i'}", *blocks))]
    for inputs, given, of_call in zip(calls, outputs, sizes, strict=True):
        first, last = _told(plan, of_call, wide)
        pointers = [tensor.data_ptr() for tensor in (*inputs, *given)]
        strides = [tensor.stride(dim) for tensor, dims in zip(inputs, _dims(plan), strict=True) for dim in dims]
        words += first.pack(*pointers, *strides), last
    return b"".join(words)


@functools.lru_cache(maxsize=4096)
def _dims(plan: str) -> list[list[int]]:
    """Of each input, the dims that are axes."""
    return [[dim for dim, axis in enumerate(given.dims) if axis is not None] for given in plan_of(plan).inputs]


@functools.lru_cache(maxsize=4096)
def _told(plan: str, sizes: tuple[int, ...], wide: bool) -> tuple[struct.Struct, bytes]:
    """How the pointers and strides of a Call are packed, and what stands behind them: it depends on the sizes alone."""
    made, divided, index = scheduled(plan), geometry_of(plan, sizes), "q" if wide else "i"
    pointers = len(made.plan.inputs) + len(made.plan.outputs)
    first = struct.Struct(f"<{pointers}Q{sum(map(len, _dims(plan)))}{index}")
    magics, shifts = zip(*map(divisor, sizes), strict=True)
    numbers = (*magics, *shifts, *divided.lanes, *divided.places)
    words = f"<{2 + len(sizes)}{index}{2 * len(sizes)}I{len(divided.lanes) + len(divided.places)}i"
    last = struct.pack(words, divided.rows, divided.block_rows, *sizes, *numbers)
    return first, last + bytes(-(first.size + len(last)) % 8)


def _padded(words: bytes) -> bytes:
    return words + bytes(-len(words) % 8)


def kernel_of(plan: str, traced: Sequence[Tensor]) -> GeneratedKernel:
    """What calls will need of a plan, as far as inputs of a trace tell: at the sizes that were captured."""
    decoded = scheduled(plan).plan
    calls = reference.calls_of(traced, decoded)
    sizes = [0] * decoded.axes
    for value, given in zip(calls[0], decoded.inputs, strict=True):
        for size, axis in zip(traced_sizes(value.shape, unknown=0), given.dims, strict=True):
            if axis is not None:
                sizes[axis] = size
    held = held_by_lanes(scheduled(plan), sizes)
    return generated(plan, _dtypes(calls[0]), held=held, calls=len(calls))


def _in_pytorch(inputs: list[Tensor], plan: str) -> list[Tensor]:
    return reference.of_calls(inputs, plan_of(plan))


def _fake(inputs: list[Tensor], plan: str) -> list[Tensor]:
    decoded = plan_of(plan)
    calls = reference.calls_of(inputs, decoded)
    made = [reference.empty_outputs(call, decoded, reference.sizes_of(call, decoded)) for call in calls]
    return [output for outputs in made for output in outputs]


_SCHEMA = "gpu_grouped_pointwise(Tensor[] inputs, str plan) -> Tensor[]"
OPERATORS = Operators((Operator(_SCHEMA, _in_pytorch, _fake, facts=Facts(rows="axes")),))
