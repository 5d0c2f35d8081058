"""A plan of target attention as attention.cu reads it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ... import cuda_call
from .. import plan as p
from ..plan import CONSTANT, MOST_POSITIONS_ON_CUDA, MOST_WIDTH_ON_CUDA, PARAMETER, Plan, Step

# attention.cu's: how many records there may be, and what one looks like.
OPERANDS = 48
_BLOCKS, _TERMS, _QUERIES, _KEYS, _PRODUCTS = (16, "<7i"), (16, "<if"), (8, "<3i"), (4, "<3i"), (8, "<4i")
_LAYERS, _NORMS, _CONSTANTS = (5, "<12i"), (4, "<6if"), (13, "<f")
_STEPS, _TAIL = (40, "<4i"), (8, "<2if")
_HEADER = "<17i"  # behind the number of rows and whether products are exact
_STEPWISE, _NONE, _RELU = range(3)
_GROUPS = (1, 2, 3, 5, 8, 10, 16)  # of 8 columns, that a layer is computed in
_IN_PLACE = 80  # columns of a layer that may stand where its inputs do
_ROWS, _WARPS, _FEWEST = 16, 16, 2  # positions of a warp at a time; warps of a block, at most and at least
Lists = Sequence[Sequence[Tensor]]  # rows, positions, masks, params


class _Unfit(Exception):
    """The kernel does not serve this plan with these shapes."""


def width_of(positions: Sequence[Tensor], plan: Plan) -> int:
    """The columns of the result."""
    return positions[0].shape[1] if plan.values < 0 else positions[plan.values].shape[2]


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
        self.floats = self.inputs = 0  # places that are taken in shared memory, and columns of the inputs
        self.blocks: list[tuple[int, ...]] = []
        self.terms: list[tuple[int, float]] = []
        self.queries: list[tuple[int, ...]] = []
        self.keys: list[tuple[int, ...]] = []
        self.products: list[tuple[int, ...]] = []

    def encoded(self) -> bytes:
        plan, T = self.plan, self._positions()
        width = width_of(self.positions, plan)
        _check(plan.values < 0 or width <= MOST_WIDTH_ON_CUDA)
        N = self._size(plan.weight, plan.bias)[0]
        self._first_layer(N)
        layers = [self._size(*layer) for layer in plan.layers]
        columns = self._check_steps(N, layers)
        records = self._layers([(N, 0), *layers])
        norms = [
            (*map(self.param, (n.mean, n.variance, n.weight, n.bias)), self._place(2 * of), of, n.eps)
            for n, of in zip(plan.norms, columns, strict=True)
        ]
        is_bool = bool(self.masks) and self.masks[0].dtype == torch.bool
        stride = _stride(self.inputs)
        of_team = 8 + _WARPS + MOST_WIDTH_ON_CUDA + self.query[-1] + _padded(2 * T)
        most = cuda_call.most_shared(self.positions[0].device)
        _check(4 * (self.floats + of_team + _FEWEST * _ROWS * stride) <= most)
        counts = len(self.blocks), len(self.queries), len(self.keys), len(self.products), len(records)
        header = T, *counts, len(plan.tail), self.position(plan.values), width, is_bool
        return b"".join(
            (
                struct.pack(_HEADER, *header, stride, *self.query, self.floats, of_team, most, 0),
                _records(_BLOCKS, self.blocks),
                _records(_TERMS, self.terms),
                _records(_QUERIES, self.queries),
                _records(_KEYS, self.keys),
                _records(_PRODUCTS, self.products),
                _records(_LAYERS, records),
                _records(_NORMS, norms),
                _records(_CONSTANTS, ((value,) for value in plan.constants)),
                _records(_STEPS, ((s.op, s.out, self._operand(s.left), self._operand(s.right)) for s in plan.steps)),
                _records(_TAIL, ((t.op, self.mask(t.mask), t.value) for t in plan.tail)),
            )
        )

    def _place(self, floats: int) -> int:
        """Of so many in shared memory."""
        self.floats += _padded(floats)
        return self.floats - _padded(floats)

    def _block(self, weight: int, n: int, place: int, terms: Sequence[tuple[int, float]], width: int) -> None:
        self.blocks.append((self.param(weight), place, n, _rows(n), width, len(self.terms), len(terms)))
        self.terms += terms

    def _first_layer(self, N: int) -> None:
        """Where its sources and its folded weights are."""
        plan, K = self.plan, self.params[self.plan.weight].shape[1]
        by_sources: dict[tuple[int, int], list[p.Term]] = {}
        for term in plan.terms:
            ends = [self.rows[term.row].shape[1]] * (term.row >= 0)
            ends += [self.positions[term.position].shape[2]] * (term.position >= 0)
            _check(term.start >= 0 and 0 < term.width <= K - term.start and set(ends) == {term.width})
            by_sources.setdefault((term.row, term.position), []).append(term)
        query_at, key_at, query_width = dict[int, int](), dict[int, int](), 0
        for row in sorted({row for row, _ in by_sources if row >= 0}):
            query_at[row] = query_width
            query_width += _padded(self.rows[row].shape[1])
        for position in sorted({position for _, position in by_sources if position >= 0}):
            key_at[position] = self.inputs
            width = self.positions[position].shape[2]
            self.keys.append((self.position(position), self.inputs, width))
            self.inputs += _padded(width)
        _check(bool(key_at))
        rows = _rows(N)
        query_weight = self._place(rows * query_width)
        self.query = query_weight, query_width
        self.queries = [(self.row(row), at, self.rows[row].shape[1]) for row, at in query_at.items()]
        for row, at in query_at.items():  # zeros where it is in products alone
            terms = _columns(by_sources.get((row, -1), []))
            self._block(plan.weight, N, query_weight + at * rows, terms, self.rows[row].shape[1])
        products = {key: terms for key, terms in by_sources.items() if key[1] >= 0}
        self.first = self._place(rows * sum(_padded(terms[0].width) for terms in products.values()))
        column = 0
        for (row, position), parts in products.items():
            width = parts[0].width
            factor = query_at[row] if row >= 0 else -1
            self.products.append((key_at[position], factor, _padded(width), column))
            self._block(plan.weight, N, self.first + column * rows, _columns(parts), width)
            column += _padded(width)

    def _layers(self, sizes: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
        """Every layer with the steps behind it."""
        plan = self.plan
        ends = [number for number, step in enumerate(plan.steps) if step.op == p.LINEAR] + [len(plan.steps)]
        records, begin, out, number, at = list[tuple[int, ...]](), 0, 0, -1, 0
        beside = max(self.inputs, MOST_WIDTH_ON_CUDA)
        for end in ends:
            weight, bias = plan.layers[number] if number >= 0 else (plan.weight, plan.bias)
            N, K = sizes[number + 1]
            place = self.first
            if number >= 0:
                place = self._place(_rows(N) * _padded(K))
                self._block(weight, N, place, [(0, 1.0)], K)
            to = at if N <= _IN_PLACE else beside - at
            self.inputs = max(self.inputs, to + _rows(N))
            result = plan.steps[end].left if end < len(plan.steps) else plan.score
            activation = self._activation(plan.steps[begin:end], out, result)
            records.append((self.param(bias), N, _rows(N) // 8, K, place, at, to, activation, out, begin, end, result))
            at = to
            if end < len(plan.steps):
                begin, out, number = end + 1, plan.steps[end].out, plan.steps[end].right
        return records

    def _activation(self, steps: Sequence[Step], out: int, result: int) -> int:
        if not steps:
            return _NONE if result == out else _STEPWISE
        return _RELU if len(steps) == 1 and self._is_relu(steps[0], out, result) else _STEPWISE

    def _is_relu(self, step: Step, x: int, result: int) -> bool:
        """Or a clamp at 0, which has its bound on the right."""
        zero = step.left if step.right == x else step.right
        is_zero = zero >= CONSTANT and self.plan.constants[zero - CONSTANT] == 0
        return step.op == p.MAXIMUM and is_zero and x in (step.left, step.right) and step.out == result

    def _positions(self) -> int:
        B, T = self.positions[0].shape[:2]
        _check(T <= MOST_POSITIONS_ON_CUDA)
        _check(all(x.dim() == 2 and len(x) == B for x in self.rows))
        _check(all(x.shape[:2] == (B, T) and x.dim() == 3 for x in self.positions))
        _check(all(x.shape == (B, T) for x in self.masks))
        return T

    def _size(self, weight: int, bias: int) -> tuple[int, int]:
        """Outputs and inputs of a layer."""
        _check(self.params[weight].dim() == 2)
        N, K = self.params[weight].shape
        _check(0 < N <= MOST_WIDTH_ON_CUDA and K > 0 and (bias < 0 or self._length(bias) in (1, N)))
        return N, K

    def _length(self, param: int) -> int:
        """Of a vector of channels."""
        shape = self.params[param].shape
        _check(sum(size != 1 for size in shape) <= 1)
        return self.params[param].numel()

    def _operand(self, number: int) -> int:
        is_parameter = PARAMETER <= number < CONSTANT
        return PARAMETER + self.param(number - PARAMETER) if is_parameter else number

    def _check_steps(self, N: int, layers: Sequence[tuple[int, int]]) -> list[int]:
        """Only one register passes a layer, and every vector has a number for each channel or one for all.

        Returns:
            The channels of each norm.
        """
        alive, columns = {0}, [0] * len(self.plan.norms)
        for step in self.plan.steps:
            _check(all(number in alive for number in _registers(step)))
            if step.op == p.LINEAR:
                _check(layers[step.right][1] == N)
                N, alive = layers[step.right][0], set()
            lengths = [self._length(number - PARAMETER) for number in _read(step) if PARAMETER <= number < CONSTANT]
            if step.op == p.BATCH_NORM:
                norm = self.plan.norms[step.right]
                columns[step.right] = max(columns[step.right], N)
                parts = (norm.mean, norm.variance, norm.weight, norm.bias)
                lengths += [self._length(part) for part in parts if part >= 0]
            _check(all(length in (1, N) for length in lengths))
            alive.add(step.out)
        _check(self.plan.score in alive)
        return columns


def _columns(terms: Sequence[p.Term]) -> list[tuple[int, float]]:
    return [(term.start, term.scale) for term in terms]


def _padded(size: int) -> int:
    return size + -size % 8


def _rows(n: int) -> int:
    """Of a layer's matrix in shared memory: n, and zeros."""
    return 8 * next(groups for groups in _GROUPS if 8 * groups >= n)


def _stride(width: int) -> int:
    """An odd multiple of 8 floats: eight rows are on different banks."""
    return _padded(width) + 8 * (_padded(width) % 16 == 0)


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
