"""Attention as a pointwise program: what one generated kernel computes on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

from fxopt.kernels.attention import plan as p
from fxopt.kernels.attention.plan import Operand, Plan
from fxopt.kernels.pointwise.encode import text
from fxopt.kernels.pointwise.plan import MOST_AXES, Input, Output
from fxopt.patterns.pointwise.program import Program
from fxopt.rewrites.framework.editor import Rejected

_QUERY, _KEY, _VALUE, _MASK = range(4)  # the program's inputs: views of the operands


def program_of(plan: Plan) -> str:
    """The text of a pointwise plan, with the weights as its second output where they are read.

    Its axes are those of the result as they lie in memory, then the keys, then the channels of queries and keys.

    Raises:
        Rejected: no program computes this.
    """
    if plan.masking == p.CAUSAL:
        raise Rejected("its mask is made of positions")
    if plan.weighing == p.SILU or plan.bias is not None:
        raise Rejected("its operands are no float32 of at most 64 channels")
    n = plan.factors
    if n + 4 > MOST_AXES:
        raise Rejected(f"it has {n} batch dims, expected at most {MOST_AXES - 4}")
    *factors, queries, channels = sorted(range(n + 2), key=plan.order.__getitem__)
    keys, summed = n + 2, n + 3
    inputs = [
        _input(plan.query, [*factors, queries, summed]),
        _input(plan.key, [*factors, keys, summed]),
        _input(plan.value, [*factors, keys, channels]),
        *([_input(plan.mask, [*factors, queries, keys])] if plan.mask else []),
    ]
    program = Program(n + 4, tuple(inputs))
    scores = _scores(program, plan, program.reduce("sum", program.elementwise("mul", _QUERY, _KEY), [summed]))
    weights = _softmax(program, plan, scores, keys)
    mixed = program.reduce("sum", program.elementwise("mul", weights, _VALUE), [keys])
    outputs = [_output(program, mixed, range(n + 2))]
    if plan.weights:
        outputs.append(_output(program, weights, sorted([*factors, queries, keys])))
    return text(program.plan(tuple(outputs)))


def _output(program: Program, value: int, axes: Sequence[int]) -> Output:
    whole = program.spread(value, frozenset(axes))
    assert isinstance(whole, int)
    return Output(whole, tuple(axes))


def _input(operand: Operand, axes: Sequence[int]) -> Input:
    dims = zip(operand.axes, axes, strict=True)
    return Input(tuple(None if along.dim < 0 and along.size == 1 else axis for along, axis in dims))


def _scores(program: Program, plan: Plan, product: int) -> int:
    if plan.scale != 1:
        product = program.elementwise("mul", product, float(plan.scale))
    match plan.masking:
        case p.ADDED:
            return program.elementwise("add", product, _MASK)
        case p.FILL_SET:
            return program.elementwise("where", _MASK, float(plan.fill), product)
        case p.FILL_UNSET:
            return program.elementwise("where", _MASK, product, float(plan.fill))
    return product


def _softmax(program: Program, plan: Plan, scores: int, keys: int) -> int:
    peak = program.reduce("peak", scores, [keys])
    powers = program.elementwise("exp", program.elementwise("sub", scores, peak))
    weights = program.elementwise("div", powers, program.reduce("sum", powers, [keys]))
    if not plan.safe:
        return weights
    return program.elementwise("where", program.elementwise("eq", peak, float("-inf")), 0.0, weights)
