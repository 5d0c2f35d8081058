"""What a plan must hold before the kernel reads it: the kernel trusts its numbers."""

from __future__ import annotations

from .plan import BINARY, MOST_AXES, REDUCTIONS, TERNARY, UNARY, Plan, Step

_OPERANDS = {name: n for n, names in enumerate((UNARY, BINARY, TERNARY), 1) for name in names}


def checked(plan: Plan) -> Plan:
    """The plan itself.

    Raises:
        ValueError: it is not one that a pattern makes.
    """
    _expect(0 < plan.axes <= MOST_AXES and bool(plan.inputs) and bool(plan.outputs), "axes, inputs and outputs")
    for given in plan.inputs:
        _expect(_are_axes(given.dims, plan), f"an input's axes, not {given.dims}")
    _expect(
        frozenset().union(*(given.axes for given in plan.inputs)) == frozenset(range(plan.axes)), "inputs of all axes"
    )
    for number, step in enumerate(plan.steps):
        _check_step(plan, len(plan.inputs) + number, step)
    values = range(len(plan.inputs), len(plan.inputs) + len(plan.steps))
    for output in plan.outputs:
        _expect(output.value in values, f"a step's value as output, not {output.value}")
        axes = [axis for axis in output.dims if axis is not None]
        _expect(
            _are_axes(output.dims, plan) and axes == sorted(plan.axes_of(output.value)), "the axes of an output's value"
        )
        _expect(0 in axes, "outputs along the first axis")
    written = [output.value for output in plan.outputs if not output.boolean]
    _expect(len(set(written)) == len(written), "a value as one output")
    return plan


def _check_step(plan: Plan, number: int, step: Step) -> None:
    read = [operand for operand in step.operands if isinstance(operand, int)]
    _expect(all(0 <= operand < number for operand in read), f"{step.op} to read what is made before it")
    if step.op in _OPERANDS:
        _expect(len(step.operands) == _OPERANDS[step.op], f"another number of operands for {step.op}")
        _expect(all(plan.axes_of(operand) == step.axes for operand in read), f"operands of {step.op} with its own axes")
        return
    _expect(step.op in (*REDUCTIONS, "expand") and len(read) == len(step.operands) == 1, f"an operator, not {step.op}")
    axes = plan.axes_of(read[0])
    if step.op == "expand":
        _expect(axes < step.axes <= frozenset(range(plan.axes)), "an expansion to more axes")
        return
    over = sorted(axes - step.axes)
    between = axes & frozenset(range(over[0], over[-1] + 1)) if over else axes
    _expect(step.axes < axes and 0 not in over and between == frozenset(over), f"{step.op} over neighbouring axes")


def _are_axes(dims: tuple[int | None, ...], plan: Plan) -> bool:
    axes = [axis for axis in dims if axis is not None]
    return len(set(axes)) == len(axes) and all(0 <= axis < plan.axes for axis in axes)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"fxopt.pointwise: expected {what}")
