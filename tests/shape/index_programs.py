"""Random index programs: FX graphs built by hand beside what eager computes, one value per element of the input."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Node

aten = torch.ops.aten

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*INTEGERS, torch.bool, *FLOATS)
_LARGEST_NUMEL = 20_000


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All of [-50, 50] that `dtype` holds, and its extremes."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        odd = [0.5, -0.5, 0.25, -0.0, info.tiny, -info.tiny, info.tiny / 4, -info.tiny / 4, info.eps, 2.0**31, 2.0**63]
        odd += [info.max, info.min, float("inf"), -float("inf"), float("nan"), 1e9 + 0.5, 16777217.0, -(2.0**31) - 1]
        return torch.cat([torch.arange(-50, 51, dtype=dtype), torch.tensor(odd, dtype=torch.float64).to(dtype)])
    info = torch.iinfo(dtype)
    ends = [info.min, info.min + 1, info.max - 1, info.max]
    wide = [n for n in (2**24 + 1, 2**31 - 1, 2**31, -(2**31) - 1, 2**53 + 1) if info.min <= n <= info.max]
    return torch.tensor([*range(max(-50, info.min), 51), *ends, *wide], dtype=dtype)


@dataclass
class Programs:
    """A graph of many programs. values: what eager computes for each node."""

    seed: int
    graph: Graph = field(default_factory=Graph)
    values: dict[Node, torch.Tensor] = field(default_factory=dict)
    literals: dict[str, torch.Tensor] = field(default_factory=dict)
    fakes: dict[Any, torch.Tensor] = field(default_factory=dict)
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def input(self, value: torch.Tensor) -> Node:
        return self._note(self.graph.placeholder(f"x{len(self.values)}"), value)

    def literal(self, value: torch.Tensor) -> Node:
        name = f"c{len(self.literals)}"
        self.literals[name] = value
        node = self._note(self.graph.get_attr(name), value)
        node.meta["literal"] = True
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node | None:
        """A node, where eager can compute it."""
        real = torch.fx.node.map_arg((args, kwargs), self.values.__getitem__)
        if _traps(target, *real[0]):
            return None
        try:
            value = target(*real[0], **real[1])
        except (RuntimeError, IndexError, TypeError, ValueError):
            return None
        tensor = value[0] if isinstance(value, list | tuple) else value
        if tensor.numel() > _LARGEST_NUMEL:
            return None
        return self._note(self.graph.call_function(target, args, kwargs), value)

    def _note(self, node: Node, value: Any) -> Node:
        self.values[node] = value
        if isinstance(value, torch.Tensor):
            node.meta["val"] = self._fake(value)
        return node

    def _fake(self, value: torch.Tensor) -> torch.Tensor:
        kind = (tuple(value.shape), value.dtype)
        if kind not in self.fakes:
            with self.mode:
                self.fakes[kind] = torch.empty(value.shape, dtype=value.dtype)
        return self.fakes[kind]

    def grow(
        self, steps: int, sources: list[Node], operations: list[Callable[[Programs, list[Node]], Node | None]]
    ) -> list[Node]:
        """One program of up to `steps` operators over `sources`; its nodes."""
        pool = list(sources)
        for _ in range(steps):
            node = self.random.choice(operations)(self, pool)
            if node is not None:
                pool.append(node)
        return pool

    def pick(self, pool: list[Node], *, latest: float = 0.6) -> Node:
        return pool[-1] if self.random.random() < latest else self.random.choice(pool)

    def number(self) -> int | float:
        near = self.random.randint(-60, 60)
        return self.random.choice(
            [near, near, near, 0, 1, -1, 100, 127, 128, 255, 1000, near + 0.5, 2**31, -(2**31), 1e-3]
        )


def _traps(target: Any, *args: Any) -> bool:
    """The smallest integer divided by -1 stops the process."""
    if getattr(target, "overloadpacket", None) not in (aten.div, aten.floor_divide, aten.remainder, aten.fmod):
        return False
    left, right = args[:2]
    whole = all(
        not (isinstance(a, torch.Tensor) and a.is_floating_point()) and not isinstance(a, float) for a in (left, right)
    )
    return whole and bool((torch.as_tensor(right) == -1).any())


def _scalar(*targets: Any) -> Callable[[Programs, list[Node]], Node | None]:
    return lambda p, pool: p.call(p.random.choice(targets), p.pick(pool), p.number())


def _pair(*targets: Any) -> Callable[[Programs, list[Node]], Node | None]:
    return lambda p, pool: p.call(p.random.choice(targets), p.pick(pool), p.pick(pool, latest=0.3))


def _unary(*targets: Any) -> Callable[[Programs, list[Node]], Node | None]:
    return lambda p, pool: p.call(p.random.choice(targets), p.pick(pool))


def _cast(p: Programs, pool: list[Node]) -> Node | None:
    return p.call(aten.to.dtype, p.pick(pool), p.random.choice(DTYPES))


def _bits(p: Programs, pool: list[Node]) -> Node | None:
    """Of one type, read as another of its size."""
    source, dtype = p.pick(pool), p.random.choice(DTYPES)
    same_size = p.values[source].dtype.itemsize == dtype.itemsize
    return p.call(aten.view.dtype, source, dtype) if same_size else None


def _clamp(p: Programs, pool: list[Node]) -> Node | None:
    low, high = p.random.choice([(p.number(), p.number()), (p.number(), None), (None, p.number())])
    return p.call(aten.clamp.default, p.pick(pool), low, high)


def _clamp_tensor(p: Programs, pool: list[Node]) -> Node | None:
    return p.call(aten.clamp.Tensor, p.pick(pool), p.pick(pool), p.random.choice([p.pick(pool), None]))


def _bools(p: Programs, pool: list[Node]) -> list[Node]:
    return [node for node in pool if p.values[node].dtype == torch.bool]


def _compare(p: Programs, pool: list[Node]) -> Node | None:
    name = p.random.choice(["lt", "le", "gt", "ge", "eq", "ne"])
    if p.random.random() < 0.7:
        return p.call(getattr(aten, name).Scalar, p.pick(pool), p.number())
    return p.call(getattr(aten, name).Tensor, p.pick(pool), p.pick(pool, latest=0.3))


def _where(p: Programs, pool: list[Node]) -> Node | None:
    """Of a fresh comparison mostly, so that refinement is met."""
    bools = _bools(p, pool)
    condition = _compare(p, pool) if p.random.random() < 0.7 or not bools else p.random.choice(bools)
    if condition is None:
        return None
    tested = condition.args[0] if p.random.random() < 0.6 and condition.args else p.pick(pool)
    form = p.random.randrange(5)
    if form == 0:
        return p.call(aten.where.self, condition, tested, p.pick(pool))
    if form == 1:
        return p.call(aten.where.self, condition, p.pick(pool), tested)
    if form == 2:
        return p.call(aten.where.ScalarOther, condition, tested, p.number())
    if form == 3:
        return p.call(aten.where.ScalarSelf, condition, p.number(), tested)
    return p.call(aten.masked_fill.Scalar, tested, condition, p.number())


def _where_derived(p: Programs, pool: list[Node]) -> Node | None:
    """where(x < c, ..., f(x)): refinement through an elementwise step; and through the same view on both."""
    condition = _compare(p, pool)
    if condition is None or not isinstance(condition.args[0], Node):
        return None
    kept = condition.args[0]
    if p.random.random() < 0.5:
        kept = p.random.choice([_cast, _clamp, _scalar(aten.add.Tensor, aten.mul.Tensor)])(p, [kept])
    else:
        view = p.random.choice([(aten.unsqueeze.default, 0), (aten.flip.default, [0]), (aten.view.default, [-1])])
        condition, kept = p.call(view[0], condition, view[1]), p.call(view[0], kept, view[1])
    if condition is None or kept is None:
        return None
    if p.random.random() < 0.3:
        inverse = p.call(aten.logical_not.default, condition)
        condition = condition if inverse is None else inverse
    if p.random.random() < 0.5:
        return p.call(aten.where.ScalarSelf, condition, p.number(), kept)
    return p.call(aten.where.ScalarOther, condition, kept, p.number())


def _logic(p: Programs, pool: list[Node]) -> Node | None:
    """Of two fresh comparisons mostly: i >= 0 and i < n."""
    sides = [_compare(p, pool) for _ in range(2)] if p.random.random() < 0.7 else [p.pick(pool) for _ in range(2)]
    target = p.random.choice([aten.logical_and, aten.logical_or, aten.logical_xor]).default
    return None if None in sides else p.call(target, *sides)


def _bit_logic(p: Programs, pool: list[Node]) -> Node | None:
    sides = [_compare(p, pool) for _ in range(2)]
    target = p.random.choice([aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor]).Tensor
    return None if None in sides else p.call(target, *sides)


def _bucketize(p: Programs, pool: list[Node]) -> Node | None:
    edges = p.literal(
        torch.linspace(-3, 40, p.random.choice([1, 3, 100])).to(p.random.choice([torch.float32, torch.int64]))
    )
    options = {"out_int32": p.random.random() < 0.3, "right": p.random.random() < 0.5}
    if p.random.random() < 0.5:
        return p.call(aten.searchsorted.Tensor, edges, p.pick(pool), **options)
    return p.call(aten.bucketize.Tensor, p.pick(pool), edges, **options)


def _table(p: Programs, pool: list[Node]) -> Node | None:
    """Rows of a constant."""
    table = p.literal(torch.tensor([p.random.randint(-9, 9) for _ in range(5)], dtype=p.random.choice(INTEGERS[:4])))
    position = p.call(aten.remainder.Scalar, p.pick(pool), 5)
    index = p.call(aten.to.dtype, position, torch.int64) if position is not None else None
    return p.call(aten.index.Tensor, table, [index]) if index is not None else None


def _move(p: Programs, pool: list[Node]) -> Node | None:
    target, *args = p.random.choice(
        [
            (aten.flip.default, [0]), (aten.unsqueeze.default, 0), (aten.flatten.using_ints,), (aten.clone.default,),
            (aten.slice.Tensor, 0, 1, 40), (aten.roll.default, 3), (aten.constant_pad_nd.default, [1, 2], p.number()),
            (aten.pad.default, [0, 1], "constant", None), (aten.tril.default,), (aten.repeat.default, [2]),
        ]
    )  # fmt: skip
    return p.call(target, p.pick(pool), *args)


def _join(p: Programs, pool: list[Node]) -> Node | None:
    return p.call(p.random.choice([aten.cat.default, aten.stack.default]), [p.pick(pool), p.pick(pool)])


def _position(p: Programs, pool: list[Node]) -> Node | None:
    target = p.random.choice([aten.argmax.default, aten.argmin.default, aten.argsort.default, aten.nonzero.default])
    return p.call(target, p.pick(pool))


def _reduce(p: Programs, pool: list[Node]) -> Node | None:
    targets = [
        aten.sum.default,
        aten.amax.default,
        aten.amin.default,
        aten.all.default,
        aten.any.default,
        aten.mean.default,
    ]
    if p.random.random() < 0.3:
        return p.call(aten.cumsum.default, p.pick(pool), 0)
    return p.call(p.random.choice(targets), p.pick(pool))


def _part(p: Programs, pool: list[Node]) -> Node | None:
    """One output of an operator with several."""
    target, *args = p.random.choice(
        [
            (aten.sort.default,), (aten.topk.default, 2), (aten.max.dim, 0), (aten._unique2.default, True, True, True),
            (aten.unique_consecutive.default, True, True), (aten.median.dim, 0), (aten.kthvalue.default, 2),
            (aten.cummax.default, 0), (aten.aminmax.default,), (aten.split.Tensor, 50), (aten.mode.default, 0),
            (aten.where.default,), (aten.unique_dim.default, 0, True, True, True),
        ]
    )  # fmt: skip
    both = p.call(target, p.pick(pool), *args)
    if both is None:
        return None
    number = p.random.randrange(len(p.values[both]))
    node = p.graph.call_function(operator.getitem, (both, number))
    return p._note(node, p.values[both][number])


def _divide(p: Programs, pool: list[Node]) -> Node | None:
    other = p.random.choice([p.number(), p.pick(pool)])
    mode = p.random.choice(["floor", "trunc", None])
    target = aten.div.Tensor_mode if isinstance(other, Node) else aten.div.Scalar_mode
    return p.call(target, p.pick(pool), other, rounding_mode=mode)


def _shift(p: Programs, pool: list[Node]) -> Node | None:
    target = p.random.choice([aten.bitwise_left_shift, aten.bitwise_right_shift]).Tensor_Scalar
    return p.call(target, p.pick(pool), p.random.randint(-1, 9))


def _pick_rows(p: Programs, pool: list[Node]) -> Node | None:
    """Elements of one value at positions given by another."""
    position = p.call(aten.remainder.Scalar, p.pick(pool), 7)
    index = p.call(aten.to.dtype, position, torch.int64) if position is not None else None
    if index is None:
        return None
    form = p.random.randrange(4)
    if form == 0:
        return p.call(aten.gather.default, p.pick(pool), 0, index)
    if form == 1:
        return p.call(aten.index_select.default, p.pick(pool), 0, index)
    if form == 2:
        return p.call(aten.scatter.value, p.pick(pool), 0, index, p.number())
    return p.call(aten.one_hot.default, index, 7)


def _filter(p: Programs, pool: list[Node]) -> Node | None:
    mask = _compare(p, pool)
    if mask is None:
        return None
    if p.random.random() < 0.5:
        return p.call(aten.masked_select.default, mask.args[0], mask)
    return p.call(aten.index.Tensor, mask.args[0], [mask])


def _create(p: Programs, pool: list[Node]) -> Node | None:
    dtype = p.random.choice(DTYPES)
    form = p.random.randrange(4)
    if form == 0:
        ends = p.random.randint(-60, 60), p.random.randint(-60, 60)  # not 2**31: that takes memory
        return p.call(aten.arange.start_step, *ends, p.random.choice([1, 2, -1, 7]), dtype=dtype)
    if form == 1:
        return p.call(aten.full_like.default, p.pick(pool), p.number(), dtype=dtype)
    if form == 2:
        return p.call(p.random.choice([aten.zeros_like, aten.ones_like]).default, p.pick(pool), dtype=dtype)
    return p.call(aten.new_full.default, p.pick(pool), [3], p.number(), dtype=dtype)


def _membership(p: Programs, pool: list[Node]) -> Node | None:
    if p.random.random() < 0.5:
        return p.call(aten.isin.Tensor_Scalar, p.pick(pool), p.number(), invert=p.random.random() < 0.5)
    return p.call(aten.isin.Tensor_Tensor, p.pick(pool), p.pick(pool))


def _count(p: Programs, pool: list[Node]) -> Node | None:
    return p.call(p.random.choice([aten.count_nonzero.default, aten.median.default]), p.pick(pool))


def _nan_to_num(p: Programs, pool: list[Node]) -> Node | None:
    return p.call(aten.nan_to_num.default, p.pick(pool), *p.random.choice([(), (p.number() * 1.0,), (0.0, 9.0, -9.0)]))


OPERATIONS = [
    _scalar(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.rsub.Scalar, aten.div.Tensor),
    _scalar(aten.remainder.Scalar, aten.remainder.Scalar, aten.fmod.Scalar, aten.floor_divide.default),
    _scalar(aten.bitwise_and.Scalar, aten.bitwise_or.Scalar, aten.bitwise_xor.Scalar, aten.clamp_min.default),
    _scalar(aten.clamp_max.default, aten.clamp_min.default),
    _pair(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    _pair(aten.minimum.default, aten.maximum.default, aten.fmin.default, aten.fmax.default),
    _pair(aten.remainder.Tensor, aten.fmod.Tensor, aten.floor_divide.default),
    _pair(aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_xor.Tensor),
    _unary(aten.abs.default, aten.neg.default, aten.relu.default, aten.sign.default, aten.square.default),
    _unary(aten.floor.default, aten.ceil.default, aten.round.default, aten.trunc.default, aten.sqrt.default),
    _unary(aten.sigmoid.default, aten.exp.default, aten.relu6.default, aten.bitwise_not.default),
    _unary(aten.isnan.default, aten.isinf.default, aten.isfinite.default, aten.logical_not.default),
    _cast, _cast, _bits, _clamp, _clamp, _clamp_tensor, _compare, _where, _where, _where, _where_derived,
    _where_derived, _logic, _bit_logic, _bucketize, _table, _move, _move, _join, _position, _reduce, _part, _divide,
    _shift, _nan_to_num, _pick_rows, _filter, _create, _membership, _count,
]  # fmt: skip
