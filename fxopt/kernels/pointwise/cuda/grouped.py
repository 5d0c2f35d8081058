"""fxopt::gpu_grouped_pointwise: calls of one pointwise plan, which need not wait for each other, as one launch."""

from __future__ import annotations

from torch import Tensor

from fxopt.facts import Facts

from ...operators import Operator, Operators
from .. import reference
from ..encode import plan_of


def _in_pytorch(inputs: list[Tensor], plan: str) -> list[Tensor]:
    return reference.of_calls(inputs, plan_of(plan))


def _fake(inputs: list[Tensor], plan: str) -> list[Tensor]:
    decoded = plan_of(plan)
    calls = reference.calls_of(inputs, decoded)
    made = [reference.empty_outputs(call, decoded, reference.sizes_of(call, decoded)) for call in calls]
    return [output for outputs in made for output in outputs]


_SCHEMA = "gpu_grouped_pointwise(Tensor[] inputs, str plan) -> Tensor[]"
OPERATORS = Operators((Operator(_SCHEMA, _in_pytorch, _fake, facts=Facts(rows="axes")),))
