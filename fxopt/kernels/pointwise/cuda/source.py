"""A plan as the source of one CUDA kernel. steps.cuh holds what all of them share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from .held import HeldWriter
from .phases import PhaseWriter
from .schedule import Schedule

KERNEL = "_ZN5fxopt9generated16pointwise_kernelENS0_5CallsE"  # as C++ calls it
_STEPS = Path(__file__).with_name("steps.cuh")


def parameters(schedule: Schedule) -> dict[str, list[str]]:
    """The names of the fields of the kernel's parameters, by type and in order."""
    plan = schedule.plan
    return {
        "const void*": [f"input{k}" for k in range(len(plan.inputs))],
        "void*": [f"output{k}" for k in range(len(plan.outputs))],
        "Index": [
            *(f"stride{k}_{axis}" for k, given in enumerate(plan.inputs) for axis in given.dims if axis is not None),
            *("rows", "block_rows"),
            *(f"size{axis}" for axis in range(plan.axes)),
        ],
        "unsigned": [*(f"magic{axis}" for axis in range(plan.axes)), *(f"shift{axis}" for axis in range(plan.axes))],
        "int": [
            *(f"lanes{at}" for at, phase in enumerate(schedule.phases) if phase.over),
            *(f"place{value}" for value in schedule.kept),
        ],
    }


def source(schedule: Schedule, dtypes: Sequence[torch.dtype], wide: bool, held: tuple[int, int], calls: int = 1) -> str:
    """The kernel for inputs of these dtypes; `wide` where 32 bits do not count their elements.

    Args:
        held: :func:`.held.held_by_lanes`.
        calls: of the plan in a launch; the blocks of each stand behind those of the one before.
    """
    fields = (f"  {kind} {', '.join(names)};" for kind, names in _declared(schedule))
    written = HeldWriter(schedule, dtypes, *held) if held[0] else PhaseWriter(schedule, dtypes)
    return "\n".join([
        f"using Index = {'long long' if wide else 'int'};",
        _STEPS.read_text(),
        "namespace fxopt {\nnamespace generated {\n\nstruct Call {",
        *fields,
        "};",
        f"constexpr int kCalls = {calls};",
        "struct Calls {\n  Index blocks[kCalls];\n  Call call[kCalls];\n};\n",
        "__device__ __forceinline__ void run(const Call& c, Index block) {",
        "  const int thread = int(threadIdx.x);",
        "  const Index first = block * c.block_rows;",
        "  const Index rows = c.rows - first < c.block_rows ? c.rows - first : c.block_rows;",
        *written.lines(),
        "}\n",
        "// The block's call is found so that it lies at a place which the compiler knows.",
        "template <int K>",
        "__device__ __forceinline__ void find(const Calls& all, Index block) {",
        "  if (K == kCalls - 1 || block < all.blocks[K]) run(all.call[K], block);",
        "  else if constexpr (K < kCalls - 1) find<K + 1>(all, block - all.blocks[K]);",
        "}\n",
        "__global__ void __launch_bounds__(kThreads) pointwise_kernel(const __grid_constant__ Calls all) {",
        "  in_turn();",
        "  find<0>(all, Index(blockIdx.x));",
        "}\n\n}  // namespace generated\n}  // namespace fxopt\n",
    ])  # fmt: skip


def _declared(schedule: Schedule) -> Iterator[tuple[str, list[str]]]:
    for kind, names in parameters(schedule).items():
        stars = [f"*{name}" for name in names] if kind.endswith("*") else names
        if names:
            yield kind.removesuffix("*"), stars
