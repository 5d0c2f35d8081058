"""What a tower program must hold before the kernel reads it: of a program the kernel checks the inputs' sizes alone."""

from __future__ import annotations

from .plan import Linear, Mixture, Plan, Source, Step


def checked(plan: Plan) -> Plan:
    """The plan itself.

    Raises:
        ValueError: it is not one that a pattern makes.
    """
    _expect(bool(plan.inner) and bool(plan.outputs), "inputs and outputs")
    for buffer in plan.buffers:
        _expect(buffer.width >= 0 and buffer.inner >= 0, "buffers of some columns")
        _expect(not buffer.inner or buffer.width % buffer.inner == 0, "an output of equal rows")
    for step in plan.steps:
        _check_step(plan, step)
    return plan


def _check_step(plan: Plan, step: Step) -> None:
    _expect(0 <= step.buffer < len(plan.buffers) and step.width >= 0, "steps that write a buffer")
    _expect(0 <= step.column <= plan.buffers[step.buffer].width - step.width, "steps that write inside of their buffer")
    for source in step.sources:
        _expect(source.start >= 0 and _is_there(plan, source), "steps that read what is there")
    if isinstance(step, Linear):
        _expect(0 <= step.weight < plan.n_weights and -1 <= step.bias < plan.n_biases, "weights that are there")
    if isinstance(step, Mixture):
        _expect(bool(step.experts), "a mixture of some experts")


def _is_there(plan: Plan, source: Source) -> bool:
    if not source.is_input:
        return 0 <= source.tensor < len(plan.buffers)
    return 0 <= source.tensor < len(plan.inner) and plan.inner[source.tensor] == (source.place >= 0)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"fxopt.towers: expected {what}")
