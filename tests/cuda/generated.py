"""Generated pointwise kernels through the shim: several in one library, each under a name of its own."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from fxopt.kernels.pointwise import cuda, reference
from fxopt.kernels.pointwise.cuda import generated, geometry, parameters
from fxopt.kernels.pointwise.cuda.geometry import THREADS, geometry_of, launch_of, sizes_of
from fxopt.kernels.pointwise.encode import text
from fxopt.kernels.pointwise.plan import Plan
from tests.cuda.planted import run
from tests.cuda.shim_library import GUARD, POISON, ShimError, compile_shim

LAUNCH = """
SHIM_EXPORT void run_{name}(const fxopt::{name}::Calls* c, unsigned blocks, unsigned shared) {{
  cudaLaunchConfig_t config{{dim3(blocks), dim3({threads}), shared, nullptr}};
  cudaLaunchKernelEx(&config, fxopt::{name}::pointwise_kernel, *c);
}}
"""
Key = tuple[str, tuple[torch.dtype, ...], bool, tuple[int, int], int]


def key_of(plan: Plan, inputs: Sequence[Tensor], wide: bool = False) -> Key:
    """Of a call, or of several behind each other."""
    first, *more = reference.calls_of(inputs, plan)
    held = geometry_of(text(plan), sizes_of(first, plan)).held
    return text(plan), tuple(tensor.dtype for tensor in first), wide, held, 1 + len(more)


@contextmanager
def divided_anew(patched: AbstractContextManager[object]) -> Iterator[None]:
    """Nothing is remembered of how launches were divided before, and behind."""
    remembered = geometry_of, launch_of, cuda._told
    for each in remembered:
        each.cache_clear()
    try:
        with patched:
            yield
    finally:
        for each in remembered:
            each.cache_clear()


def in_phases() -> AbstractContextManager[None]:
    """Rows are not held in registers."""
    return divided_anew(patch.object(geometry, "held_by_lanes", lambda *_: (0, 0)))


def several_values() -> AbstractContextManager[None]:
    """Threads have several values, also where that leaves few blocks."""
    return divided_anew(patch.dict(geometry._FEWEST_BLOCKS, {False: 1, True: 1}))


class Kernels:
    """Kernels by plan, dtypes and width. bugs: what is wrong, what the source says and what instead, {} where awake."""

    def __init__(self, folder: Path, keys: Sequence[Key], bugs: Mapping[str, tuple[str, str]] | None = None) -> None:
        self._names = {key: f"generated{number}" for number, key in enumerate(dict.fromkeys(keys))}
        sources = [self._source(key, name, bugs or {}) for key, name in self._names.items()]
        path = folder / "kernels.cu"
        path.write_text("#include <cuda_runtime.h>\n" + "\n".join(sources))
        self.library = ctypes.CDLL(str(compile_shim(folder, path, "-O0")))

    def _source(self, key: Key, name: str, bugs: Mapping[str, tuple[str, str]]) -> str:
        index, _, kernel = generated(*key).source.partition("\n")
        for number, (old, new) in enumerate(bugs.values(), 1):
            assert old in kernel, f"the source no longer holds {old!r}"
            kernel = kernel.replace(old, new.replace("{}", f"(shim::planted == {number})"))
        source = f"namespace fxopt {{ namespace generated {{ {index} }} }}\n{kernel}"
        return source.replace("generated", name) + LAUNCH.format(name=name, threads=THREADS)

    def __call__(self, inputs: Sequence[Tensor], plan: Plan, wide: bool = False, seed: int = 0) -> list[Tensor]:
        """The outputs. Raises ShimError: a load outside of an input, a write outside of an output, a race."""
        line, calls = text(plan), reference.calls_of(inputs, plan)
        sizes = tuple(sizes_of(call, plan) for call in calls)
        launch = launch_of(line, sizes)
        assert launch.fits
        memory, outputs = zip(*(_guarded(plan, of_call) for of_call in sizes), strict=True)
        words = parameters(calls, outputs, line, sizes, wide)
        function = getattr(self.library, f"run_{self._names[key_of(plan, inputs, wide)]}")

        def launched(words: bytes, dtype: int, stream: None) -> None:
            if blocks := sum(launch.blocks):
                function(words, blocks, 4 * launch.kept)

        run(self.library, launched, words, inputs, torch.float32, seed)
        for each in itertools.chain.from_iterable(memory):
            if (each[:GUARD] != POISON).any() or (each[-GUARD:] != POISON).any():
                raise ShimError("a write outside the output")
        booleans = [output.boolean for output in plan.outputs] * len(calls)
        flat = itertools.chain.from_iterable(outputs)
        return [y.bool() if boolean else y for y, boolean in zip(flat, booleans, strict=True)]


def _guarded(plan: Plan, sizes: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of a call within memory that nobody may write around them, and that memory."""
    shapes = [[1 if axis is None else sizes[axis] for axis in output.dims] for output in plan.outputs]
    dtypes = [torch.uint8 if output.boolean else torch.float32 for output in plan.outputs]
    counts = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    memory = [torch.full((2 * GUARD + count,), POISON, dtype=torch.uint8) for count in counts]
    outputs = [
        each[GUARD : len(each) - GUARD].view(dtype).view(shape)
        for each, dtype, shape in zip(memory, dtypes, shapes, strict=True)
    ]
    return memory, outputs


def exact(inputs: Sequence[Tensor], plan: Plan) -> list[Tensor]:
    return reference.pointwise([tensor.double() for tensor in inputs], plan)
