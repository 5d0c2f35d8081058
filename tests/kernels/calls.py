"""A small call of every operator that has code for the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from fxopt.kernels.attention import op as attention
from fxopt.kernels.attention import plan as a
from fxopt.kernels.attention.plan import Axis
from fxopt.kernels.columns import jagged
from fxopt.kernels.columns import op as columns
from fxopt.kernels.columns import reference as columns_reference
from fxopt.kernels.columns.encode import encode as columns_encode
from fxopt.kernels.columns.plan import Column, Source
from fxopt.kernels.columns.plan import Plan as ColumnsPlan
from fxopt.kernels.compressed import op as compressed
from fxopt.kernels.compressed_interaction import op as compressed_interaction
from fxopt.kernels.field_index import op as field_index
from fxopt.kernels.gru import op as gru
from fxopt.kernels.interactions import attention as pair_attention
from fxopt.kernels.interactions import dot, pair_sum
from fxopt.kernels.k_largest import op as k_largest
from fxopt.kernels.lookup_products import op as lookup_products
from fxopt.kernels.mlp import gradient
from fxopt.kernels.mlp import op as mlp
from fxopt.kernels.mlp import plan as m
from fxopt.kernels.pointwise import encode as pointwise_encode
from fxopt.kernels.pointwise import op as pointwise
from fxopt.kernels.pointwise import plan as pw
from fxopt.kernels.row_update import op as row_update
from fxopt.kernels.table_batched import op as table_batched
from fxopt.kernels.target_attention import op as target_attention
from fxopt.kernels.target_attention import plan as t
from fxopt.kernels.towers import op as towers
from fxopt.kernels.towers import plan as tw
from tests.kernels.conftest import RandomCall


@dataclass(frozen=True)
class Call:
    """An operator's arguments.

    Attributes:
        home: the module that defines it.
        reference: the same in PyTorch.
        plans: which arguments the kernel takes for its plan.
        native: whether there is a kernel; else it is made of PyTorch's operators.
    """

    home: ModuleType
    name: str
    arguments: tuple[Any, ...]
    reference: Callable[..., Any] | None = None
    plans: tuple[int, ...] = ()
    native: bool = True

    def load(self) -> None:
        """Compiles the kernel at the first call."""
        if self.home is columns:
            columns.load()
        else:
            self.home.OPERATORS.compiled()

    def __call__(self, *arguments: Any) -> Any:
        return getattr(torch.ops.fxopt, self.name).default(*arguments)


def calls() -> Iterator[Call]:
    torch.manual_seed(0)
    yield from _dense()
    yield from _interactions()
    yield from _columns()


def _dense() -> Iterator[Call]:
    plan = _softmax_beside_a_broadcast()
    yield Call(pointwise, "pointwise", ([_some(3, 5), _some(3, 4), _some(3, 5)], plan), _pointwise, (1,))
    program = tw.Plan(
        (False, True),
        2,
        1,
        (tw.Buffer(9, is_output=False), tw.Buffer(10, 2), tw.Buffer(5)),
        tw.leveled(
            [
                *(tw.Linear(0, 0, 5, tw.Source(0), 0, 0, "relu"), tw.Linear(0, 5, 4, tw.Source(1, 1), 1, -1, "tanh")),
                *(tw.Copy(1, 0, 5, tw.Source(0, -1, 0, False)), tw.Product(1, 5, 5, tw.Source(0), tw.Source(0, -1, 2))),
                tw.Mixture(
                    *(2, 0, 5, tw.Source(0, -1, 5, False), True), (tw.Source(0, -1, 1), tw.Source(0, -1, 0, False))
                ),
            ]
        ),
    )
    tensors = [_some(3, 7), _some(3, 2, 4)], [_some(5, 7), _some(4, 4)], [_some(5)]
    yield Call(towers, "towers", (*tensors, tw.encode(program)), towers._in_pytorch, (3,))
    steps = [
        *(m.Step(m.Op.LINEAR, (0, 1)), m.Step(m.Op.BATCH_NORM, (2, 3, None, 4), (1e-5,)), m.Step(m.Op.PRELU, (5,))),
        *(m.Step(m.Op.LINEAR, (6,)), m.Step(m.Op.LAYER_NORM, (7, None), (1e-5,)), m.Step(m.Op.CLAMP, (), (0.0, 1.0))),
    ]
    state = [_some(8, 7), _some(8), _some(8), torch.rand(8), _some(8), _some(1), _some(6, 8), _some(6)]
    for op in (m.Op.LINEAR, *gradient.FROM_RESULT):
        y = torch.rand(5, 3) if op else None
        yield Call(gradient, "linear_backward", (_some(5, 3), y, int(op)), gradient.linear_backward)
    yield Call(mlp, "mlp", ([_some(3, 4), _some(3, 3)], state, m.encode(2, steps)), mlp._in_pytorch, (2,))
    sides = [a.Operand((Axis(0, 1, -1), Axis(1, 1, -1), Axis(2, 1, -1))) for _ in range(3)]
    mask = a.Operand((Axis(0, 1, -1), Axis(-1, 0, 1), Axis(1, 1, -1)))
    words = a.Plan(*sides, mask, a.FILL_SET, -1e9, 0.5, (0, 1, 2), True).words()
    heads = _some(2, 4, 3), _some(2, 5, 3), _some(2, 5, 6), [torch.rand(2, 5) < 0.3]
    for name in ("attention", "attention_kernel"):
        yield Call(
            attention, name, (*heads, words), lambda q, k, v, m, p: attention._defined(a.Plan.of(p), q, k, v, *m), (4,)
        )
    yield from _target_attention()
    yield Call(gru, "gru", (_some(4, 2, 9), _some(2, 3), _some(9, 3), _some(9)), gru.gru)
    packed = _some(5, 9), torch.tensor([2, 2, 1]), _some(2, 3), _some(9, 3), _some(9)
    yield Call(gru, "packed_gru", packed, gru.packed_gru)
    yield Call(k_largest, "k_largest", (_some(2, 6, 3), 2, True), k_largest.k_largest)
    yield Call(compressed, "compressed_linear", (_some(3, 4), _some(5, 4), _some(5), "bf16", 0), native=False)
    yield Call(compressed, "compressed_table", (_some(6, 4), torch.uint8), native=False)


def _pointwise(inputs: list[torch.Tensor], plan: str) -> list[torch.Tensor]:
    return pointwise.reference.pointwise(inputs, pointwise_encode.plan_of(plan))


def _softmax_beside_a_broadcast() -> str:
    steps = (
        *(pw.Step("exp", (0,), frozenset((0, 1))), pw.Step("sum", (3,), frozenset((0,)))),
        *(pw.Step("expand", (4,), frozenset((0, 1))), pw.Step("div", (3, 5), frozenset((0, 1)))),
        *(pw.Step("expand", (0,), frozenset((0, 1, 2))), pw.Step("expand", (1,), frozenset((0, 1, 2)))),
        *(pw.Step("mul", (7, 8), frozenset((0, 1, 2))), pw.Step("amax", (9,), frozenset((0, 1)))),
        pw.Step("lt", (10, 2), frozenset((0, 1))),
    )
    inputs = pw.Input((0, 1)), pw.Input((0, 2)), pw.Input((0, 1))
    outputs = pw.Output(6, (0, None, 1)), pw.Output(9, (0, 1, 2)), pw.Output(11, (0, 1), boolean=True)
    return pointwise_encode.text(pw.Plan(3, inputs, steps, outputs))


def _target_attention() -> Iterator[Call]:
    terms = t.Term(0, -1, 0, 3, 1.0), t.Term(-1, 0, 3, 3, 1.0), t.Term(0, 0, 6, 3, -1.0)
    steps = t.Step(t.BATCH_NORM, 1, 0, 0), t.Step(t.PRELU, 1, 1, t.PARAMETER + 3), t.Step(t.LINEAR, 2, 1, 0)
    tail = t.TailStep(t.SCALE, -1, 0.5), t.TailStep(t.FILL, 0, -1e9), t.TailStep(t.SOFTMAX)
    plan = t.Plan(0, 1, terms, ((2, -1),), (t.Norm(4, 5, -1, -1, 1e-5),), (1.0,), steps, 2, tail, 0)
    params = [_some(5, 9), _some(5), _some(1, 5), _some(5), _some(5), torch.rand(5)]
    tensors = [_some(2, 3)], [_some(2, 4, 3)], [torch.rand(2, 4) < 0.7], params

    def defined(*arguments: Any) -> Any:
        return target_attention.reference.target_attention(*arguments[:4], t.Plan.of(arguments[4]))

    for name in ("target_attention", "target_attention_kernel"):
        yield Call(target_attention, name, (*tensors, plan.words()), defined, (4,))


def _interactions() -> Iterator[Call]:
    i, j = torch.tensor([0, 0, 1, -1]), torch.tensor([1, 2, 2, 0])
    vectors, beside = [_some(2, 2, 3), _some(2, 3)], [_some(2, 4)]
    yield Call(dot, "dot_interaction", (vectors, beside, [], i, j), dot.dot_interaction)
    yield Call(dot, "dot_interaction_backward", (_some(2, 8), i, j, vectors, 4), dot._gradients)
    x, weights = _some(2, 3, 5), _some(2, 3)
    yield Call(pair_sum, "pair_sum", (x, weights, 0.5, False), pair_sum.pair_sum)
    yield Call(pair_sum, "pair_sum_backward", (_some(2, 1), x, None, 0.5, True), pair_sum._gradients)
    shared = _some(4, 5), _some(4), _some(1, 4), None
    yield Call(pair_attention, "pair_attention", (x, i, j, *shared), pair_attention.pair_attention)
    cin = _some(2, 3, 4), _some(2, 2, 4), _some(5, 6)
    yield Call(compressed_interaction, "compressed_interaction", cin, compressed_interaction.compressed_interaction)
    yield Call(field_index, "pair_select", (_some(2, 3, 3), i, j), field_index._pair_select, native=False)
    yield Call(field_index, "mask_places", (torch.eye(3, dtype=torch.bool), 3), field_index._mask_places, native=False)
    for kind, sizes in enumerate(((), ((6,), (4,)), ((6, 3), (6, 3), (4, 2), (4, 2)))):
        state = [torch.rand(*size) for size in sizes]
        tables, rows, grads = (
            [_some(6, 3), _some(4, 2)],
            [torch.tensor([0, 2, 5]), torch.tensor([1])],
            [_some(3, 3), _some(1, 2)],
        )
        numbers = row_update.constants(0.1, 1e-8, (0.9, 0.9), 1)
        yield Call(row_update, "row_update", (tables, state, rows, grads, numbers, kind))


def _columns() -> Iterator[Call]:
    for seed in range(4):
        made = RandomCall(random.Random(seed), 5).start()
        made.dtype = "float32"
        for kind in ("lookup", "dense_pool", "masked", "bag", "copy", "more"):
            getattr(made, kind)()
        plan = columns_encode(made.plan)
        arguments = made.tensors, made.tables, plan
        yield Call(columns, "columns", arguments, _columns_like(made), (2,))
        yield Call(columns, "columns_in_pytorch", arguments, _columns_like(made), native=False)
        pooled = [c for c in made.columns if c.table is not None and c.pool != "max"]
        scattered = columns_encode(ColumnsPlan(tuple(pooled), (made.width,), ("float32",)))
        grad = [_some(5, made.width)]
        for name in ("columns_backward", "columns_row_gradients"):
            tables = made.tables if all(any(c.table == k for c in pooled) for k in range(len(made.tables))) else []
            yield Call(columns, name, (grad, made.tensors, tables, scattered), None, (3,))
    memory = torch.randint(0, 60, (5 * 8,), dtype=torch.uint8)
    described = [torch.tensor([2], dtype=torch.uint8), torch.tensor([0]), torch.tensor([5]), torch.tensor([0, 4]).int()]
    bags = [torch.tensor([4, 0, 2]), torch.tensor([0, 1, 3]), None, 0, 1]
    yield Call(table_batched, "table_batched", (memory, *described, *bags), table_batched.table_batched)
    yield Call(columns, "jagged_offsets", (torch.tensor([2, 0, 3]), [_some(5), _some(5)], True), jagged.offsets)
    pairs = tuple(Column(Source(0, fixed=((1, k),)), k % 2, 0, 4 * k) for k in range(4))
    plan = columns_encode(ColumnsPlan(pairs, (16,), ("float32",)))
    yield Call(
        lookup_products,
        "lookup_products",
        ([torch.randint(5, (3, 4))], [_some(5, 4), _some(5, 4)], plan, "1,0,1,2,3"),
        None,
        (2, 3),
    )


def _columns_like(made: RandomCall) -> Callable[..., Any]:
    """The reference, for ids and tables as wide as the plan's slots: else what is between them is nobody's."""
    plan, given = made.plan, [*made.tensors, *made.tables]

    def fits(old: torch.Tensor, new: torch.Tensor) -> bool:
        return new.dim() == old.dim() and new.shape[1:] == old.shape[1:] and (new.dtype == old.dtype or old.dim() < 2)

    def defined(tensors: list[torch.Tensor], tables: list[torch.Tensor], _: torch.Tensor) -> Any:
        fit = len(tensors) + len(tables) == len(given) and all(map(fits, given, [*tensors, *tables]))
        empty = any(x.shape[:1] == (0,) for x in tensors)  # bags of no rows: torch does not ask where they start
        return columns_reference.columns(tensors, tables, plan) if fit and not empty else None

    return defined


def _some(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)
