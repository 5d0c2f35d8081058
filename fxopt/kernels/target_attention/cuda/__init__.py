"""Target attention on a GPU, without gradients: one launch, a block a row, nothing of size [B, T, 4 D].

The first layer's weight is folded as the block reads it, for the 32 positions that it has in shared memory; positions
that a mask fills are skipped. Sums are fp32 whatever the dtype.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ... import cuda_build, cuda_call
from .. import plan as p
from .. import reference
from ..plan import CONSTANT, MOST_POSITIONS_ON_CUDA, MOST_WIDTH_ON_CUDA, PARAMETER, Plan, Step

_HERE = Path(__file__).parent
KERNEL = cuda_build.CudaLibrary(
    "fxopt_cuda_attention", source=_HERE / "attention.cu",
    headers=(*cuda_call.HEADERS, _HERE.parents[1] / "gemm/tile.cuh"), functions=("fxopt_attention",),
)  # fmt: skip
# attention.cu's: how many records there may be, and what one looks like.
OPERANDS = 48
_TERMS, _KEYS, _LAYERS, _NORMS = (12, "<4if"), (4, "<2i"), (4, "<4i"), (4, "<4if")
_CONSTANTS, _STEPS, _TAIL = (12, "<f"), (40, "<4i"), (8, "<2if")
_HEADER = "<9i4i"  # behind the number of rows
Lists = Sequence[Sequence[Tensor]]  # rows, positions, masks, params


class _Unfit(Exception):
    """The kernel does not serve this plan with these shapes."""


class Attention:
    """The operator for one plan, which keeps what it encoded for the shapes that it saw last."""

    def __init__(self, words: Sequence[int]) -> None:
        self._plan = Plan.of(list(words))
        self._known: tuple[object, bytes | None] = (None, None)

    def __call__(
        self, rows: list[Tensor], positions: list[Tensor], masks: list[Tensor], params: list[Tensor], words: object
    ) -> Tensor:
        """As `fxopt::target_attention` on CUDA tensors; in PyTorch where the kernel cannot serve."""
        lists = (rows, positions, masks, params)
        fits = cuda_call.alike((*positions, *rows, *params)) and _alike_masks(masks, positions[0])
        encoded = self._encoded(lists) if fits else None
        kernel = cuda_build.loaded(KERNEL) if encoded is not None else None
        if encoded is None or kernel is None:
            return reference.target_attention(rows, positions, masks, params, self._plan)
        out = positions[0].new_empty(positions[0].shape[0], width_of(positions, self._plan))
        cuda_call.launch(kernel.fxopt_attention, parameters(lists, out, self._plan, encoded), out)
        return out

    def _encoded(self, lists: Lists) -> bytes | None:
        if len({len(x) for tensors in lists[:3] for x in tensors}) != 1:
            return None
        rows, positions, masks, params = lists
        shapes = [x.shape[1:] for x in (*rows, *positions, *masks)], [x.shape for x in params], {x.dtype for x in masks}
        known = self._known  # another thread may replace it
        if known[0] != shapes:
            known = self._known = shapes, encode(lists, self._plan)
        return known[1]


def width_of(positions: Sequence[Tensor], plan: Plan) -> int:
    """The columns of the result."""
    return positions[0].shape[1] if plan.values < 0 else positions[plan.values].shape[2]


def parameters(lists: Lists, out: Tensor, plan: Plan, encoded: bytes) -> bytes:
    """attention.cu's Attention."""
    rows, positions, masks, params = lists
    matrices = {plan.weight, *(weight for weight, _ in plan.layers)}
    params = [x if number in matrices else x.reshape(-1) for number, x in enumerate(params)]
    operands = cuda_call.operands((out, *rows, *positions, *masks, *params), OPERANDS)
    return operands + struct.pack("<i", len(out)) + encoded


def _alike_masks(masks: Sequence[Tensor], like: Tensor) -> bool:
    dtypes = {mask.dtype for mask in masks}
    return all(mask.device == like.device for mask in masks) and dtypes in (set(), {torch.bool}, {like.dtype})


def encode(lists: Lists, plan: Plan) -> bytes | None:
    """A plan as attention.cu reads it behind the number of rows, for these shapes; None where it would not serve."""
    try:
        return _Encoder(lists, plan).encoded()
    except _Unfit:
        return None


def _check(holds: bool) -> None:
    if not holds:
        raise _Unfit


class _Encoder:
    def __init__(self, lists: Lists, plan: Plan) -> None:
        self.plan = plan
        self.rows, self.positions, self.masks, self.params = lists
        starts = [1, *(1 + sum(map(len, lists[:k])) for k in range(1, 4))]
        self.row, self.position, self.mask, self.param = map(_number_from, starts)
        _check(1 + sum(map(len, lists)) <= OPERANDS)

    def encoded(self) -> bytes:
        plan, T = self.plan, self._positions()
        width = width_of(self.positions, plan)
        _check(plan.values < 0 or width <= MOST_WIDTH_ON_CUDA)
        keys = sorted({term.position for term in plan.terms if term.position >= 0})
        _check(bool(keys))
        first = self._layer(plan.weight, plan.bias)
        for term in plan.terms:
            ends = [self.rows[term.row].shape[1]] * (term.row >= 0)
            ends += [self.positions[term.position].shape[2]] * (term.position >= 0)
            _check(term.start >= 0 and term.start + term.width <= first[3] and set(ends) == {term.width})
            _check(term.width > 0)
        layers = [self._layer(*layer) for layer in plan.layers]
        self._check_steps(first[2], [layer[2:] for layer in layers])
        is_bool = bool(self.masks) and self.masks[0].dtype == torch.bool
        values = self.position(plan.values)
        header = (T, len(plan.terms), len(keys), len(plan.steps), len(plan.tail), plan.score, values, width, is_bool)
        terms = ((self.row(t.row), self.position(t.position), t.start, t.width, t.scale) for t in plan.terms)
        norms = ((*map(self.param, (n.mean, n.variance, n.weight, n.bias)), n.eps) for n in plan.norms)
        return b"".join(
            (
                struct.pack(_HEADER, *header, *first),
                _records(_TERMS, terms),
                _records(_KEYS, ((self.position(key), self.positions[key].shape[2]) for key in keys)),
                _records(_LAYERS, layers),
                _records(_NORMS, norms),
                _records(_CONSTANTS, ((value,) for value in plan.constants)),
                _records(_STEPS, ((s.op, s.out, self._operand(s.left), self._operand(s.right)) for s in plan.steps)),
                _records(_TAIL, ((t.op, self.mask(t.mask), t.value) for t in plan.tail)),
            )
        )

    def _positions(self) -> int:
        B, T = self.positions[0].shape[:2]
        _check(T <= MOST_POSITIONS_ON_CUDA)
        _check(all(x.dim() == 2 and len(x) == B for x in self.rows))
        _check(all(x.shape[:2] == (B, T) and x.dim() == 3 for x in self.positions))
        _check(all(x.shape == (B, T) for x in self.masks))
        return T

    def _layer(self, weight: int, bias: int) -> tuple[int, int, int, int]:
        _check(self.params[weight].dim() == 2)
        N, K = self.params[weight].shape
        _check(0 < N <= MOST_WIDTH_ON_CUDA and K > 0 and (bias < 0 or self._length(bias) in (1, N)))
        return self.param(weight), self.param(bias), N, K

    def _length(self, param: int) -> int:
        """Of a vector of channels."""
        shape = self.params[param].shape
        _check(sum(size != 1 for size in shape) <= 1)
        return self.params[param].numel()

    def _operand(self, number: int) -> int:
        is_parameter = PARAMETER <= number < CONSTANT
        return PARAMETER + self.param(number - PARAMETER) if is_parameter else number

    def _check_steps(self, N: int, layers: Sequence[tuple[int, int]]) -> None:
        """Only one register passes a layer, and every vector has a number for each channel or one for all."""
        alive = {0}
        for step in self.plan.steps:
            _check(all(number in alive for number in _registers(step)))
            if step.op == p.LINEAR:
                _check(layers[step.right][1] == N)
                N, alive = layers[step.right][0], set()
            lengths = [self._length(number - PARAMETER) for number in _read(step) if PARAMETER <= number < CONSTANT]
            if step.op == p.BATCH_NORM:
                norm = self.plan.norms[step.right]
                parts = (norm.mean, norm.variance, norm.weight, norm.bias)
                lengths += [self._length(part) for part in parts if part >= 0]
            _check(all(length in (1, N) for length in lengths))
            alive.add(step.out)
        _check(self.plan.score in alive)


def _read(step: Step) -> list[int]:
    """What a step reads, as numbers of the plan."""
    return [step.left] if step.op in _UNARY else [step.left, step.right]


_UNARY = (p.LINEAR, p.BATCH_NORM, p.NEG, p.EXP, p.SIGMOID, p.TANH, p.SILU)


def _registers(step: Step) -> list[int]:
    return [number for number in _read(step) if number < PARAMETER]


def _number_from(start: int) -> Callable[[int], int]:
    return lambda number: number + start if number >= 0 else -1


def _records(kind: tuple[int, str], records: Iterable[Sequence[float]]) -> bytes:
    most, form = kind
    packed = [struct.pack(form, *record) for record in records]
    _check(len(packed) <= most)
    return b"".join(packed).ljust(most * struct.calcsize(form), b"\0")
