"""The inputs of a capture: which leaves are tensors, one symbol for each size, and fake tensors to trace with."""

from __future__ import annotations

import enum
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from fxopt import trees
from fxopt.capture.errors import CaptureError
from fxopt.torch_internals.elementwise import CaptureFakeMode
from fxopt.torch_internals.known_sizes import fresh
from fxopt.torch_internals.shape_env import TraceShapeEnv
from fxopt.torch_internals.symbols import expression

Dim = tuple[int, int]  # (tensor leaf, dim)
Shapes = tuple[tuple[int, ...], ...]

CONSTANTS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, torch.layout)
_MANY = 64  # fakes of few inputs meet no cached operator twice: 35 ms a small capture with torch's cache, 24 without
SHARED_FROM = 16  # sizes shared by this many float inputs get one symbol: 1000 columns trace in 2.3 s, not 6.6 s


@dataclass(frozen=True)
class TensorSpec:
    """One tensor input. dims: a static size, or the name of a symbol (equal names: equal sizes, see Guards)."""

    name: str
    dtype: torch.dtype
    device: torch.device
    dims: tuple[int | str, ...]
    requires_grad: bool = False

    @property
    def ndim(self) -> int:
        return len(self.dims)


@dataclass(frozen=True)
class Inputs:
    """(args, kwargs), flattened.

    tensors: the tensor leaves in order; names: readable ("args[0]['C3']"); firsts: of each one the place of the first
    that is the same object;
    constants: (leaf index, value) of every other leaf.
    """

    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    constants: tuple[tuple[int, Any], ...]
    spec: pytree.TreeSpec

    @functools.cached_property
    def firsts(self) -> tuple[int, ...]:
        places: dict[int, int] = {}
        return tuple(places.setdefault(id(tensor), place) for place, tensor in enumerate(self.tensors))

    def unflatten(self, tensors: Sequence[Any]) -> tuple[tuple, dict]:
        return trees.with_constants(tensors, self.constants, self.spec)


def flatten(args: tuple, kwargs: dict) -> Inputs:
    """Split the leaves of (args, kwargs) into tensors and constants.

    Raises:
        CaptureError: a leaf is neither a tensor nor a plain constant (a class that is no pytree).
    """
    with_paths, spec = trees.flatten_with_path((args, kwargs))
    tensors, names, constants = [], [], []
    for index, (path, leaf) in enumerate(with_paths):
        name = ("args" if path[0] == pytree.SequenceKey(0) else "kwargs") + pytree.keystr(path[1:])
        if isinstance(leaf, torch.Tensor):
            if not trees.is_dense(leaf) or leaf.is_quantized:
                raise CaptureError(f"{name}: expected a dense tensor, found {type(leaf).__qualname__}, {leaf.layout}")
            tensors.append(leaf)
            names.append(name)
        elif isinstance(leaf, (*CONSTANTS, type)):
            constants.append((index, leaf))
        else:
            raise CaptureError(f"{name}: expected tensors, constants or registered pytrees, found {trees.unread(leaf)}")
    return Inputs(tuple(tensors), tuple(names), tuple(constants), spec)


class FakeInputs:
    """Fake tensors for one trace: every dim its own symbol, except `static` ones; at least 1 if it is in `positive`.

    Attributes:
        shape_env, fake_mode: torch's symbol table and fake mode.
        tensors: the fakes.
        sources: symbol name to the dims it stands for; the first one is where its value is read.
    """

    def __init__(self, inputs: Inputs, shapes: Shapes, static: set[Dim], positive: set[Dim]):
        self.shape_env = TraceShapeEnv()
        self.fake_mode = CaptureFakeMode(self.shape_env, cached=len(inputs.tensors) >= _MANY)
        self.sources: dict[str, list[Dim]] = {}
        self._positive, self._firsts = positive, inputs.firsts
        shared = Counter(s[0] for t, s in zip(inputs.tensors, shapes, strict=True) if s and t.is_floating_point())
        self._shared: dict[int, torch.SymInt] = {}
        self.tensors: list[torch.Tensor] = []
        self.specs: list[TensorSpec] = []
        for i, (real, shape) in enumerate(zip(inputs.tensors, shapes, strict=True)):
            if (first := inputs.firsts[i]) != i:  # `q is k`, and what one of them edits the other sees
                self.tensors.append(self.tensors[first])
                self.specs.append(replace(self.specs[first], name=inputs.names[i]))
                continue
            sizes: list[int | torch.SymInt] = []
            for d, size in enumerate(shape):
                if (i, d) in static:
                    sizes.append(int(real.shape[d]))
                elif d == 0 and real.is_floating_point() and shared[size] >= SHARED_FROM:
                    sizes.append(self._shared_symbol(size, (i, d)))
                else:
                    sizes.append(self._symbol(size, (i, d)))
            fake = fresh(self.fake_mode, sizes, real.dtype, real.device)
            self.tensors.append(fake.requires_grad_(real.requires_grad))
            dims = tuple(s if isinstance(s, int) else str(expression(s)) for s in sizes)
            self.specs.append(TensorSpec(inputs.names[i], real.dtype, real.device, dims, real.requires_grad))

    def told(self, static: Mapping[Dim, int]) -> tuple[TensorSpec, ...]:
        """What is known of each input behind a trace, which has made some dims `static`."""
        return tuple(
            replace(spec, dims=tuple(static.get((first, d), size) for d, size in enumerate(spec.dims)))
            for first, spec in zip(self._firsts, self.specs, strict=True)
        )

    def _symbol(self, size: int, dim: Dim) -> torch.SymInt:
        symbol = self.shape_env.size(f"x{dim[0]}_{dim[1]}", size, positive=dim in self._positive)
        self.sources[str(expression(symbol))] = [dim]
        return symbol

    def _shared_symbol(self, size: int, dim: Dim) -> torch.SymInt:
        if size not in self._shared:
            self._shared[size] = self._symbol(size, dim)
        else:
            self.sources[str(expression(self._shared[size]))].append(dim)
        return self._shared[size]


def trace_shapes(tensors: Sequence[torch.Tensor]) -> list[Shapes]:
    """Sizes to trace with, best first. Fakes have no data, so an example of size 0 or 1 need not specialize the graph:
    batch 0 or 1 becomes 7 (and offsets of B+1 become 8); next, every dim 0 is scaled by 7 (lengths of F*B); next, every
    size below 2 becomes 7 (a transposed batch); last, the real sizes.
    """
    real: Shapes = tuple(tuple(t.shape) for t in tensors)
    first = [s[0] for s in real if s]
    if not any(size < 2 for size in first):
        return [real]

    def swap(change: Callable[[torch.Tensor, int], int]) -> Shapes:
        return tuple((change(t, s[0]), *s[1:]) if s else s for t, s in zip(tensors, real, strict=True))

    plain = [t.shape[0] for t in tensors if t.ndim and (t.ndim > 1 or t.is_floating_point())]
    batch = 0 if 0 in first and 1 not in plain else 1

    def batch_one(t: torch.Tensor, size: int) -> int:
        if size == batch + 1 and t.ndim == 1 and not t.is_floating_point():
            return 8
        return 7 if size < 2 else size

    every = tuple(tuple(7 if size < 2 else size for size in shape) for shape in real)
    return list(dict.fromkeys([swap(batch_one), swap(lambda t, size: 7 * max(size, 1)), every, real]))


def filled(shapes: Shapes) -> Shapes:
    """Shapes to trace with for empty inner dims (a padded length of 0, or a transposed batch): those become 7."""
    return tuple((*shape[:1], *(size or 7 for size in shape[1:])) for shape in shapes)
