"""What torch.compile and torch.export tell those who are traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxopt.torch_internals.dynamo import is_compiled, is_exporting, is_state, tracing


def test_export_is_told_from_compile() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if is_exporting() else x * 3

    torch.export.export(Model(), (torch.ones(2),))
    exported = torch.export.export(Model(), (torch.ones(2),)).module()
    assert exported(torch.ones(2)).tolist() == [2, 2], (
        "torch.compiler._is_exporting_flag is not set while torch.export traces: fxopt/runtime/module.py"
    )
    compiled = torch.compile(Model(), backend="eager")
    assert compiled(torch.ones(2)).tolist() == [3, 3], (
        "torch.compiler._is_exporting_flag is set while Dynamo traces, which would then see the original model"
    )


def test_compiled_modules_are_told() -> None:
    model = nn.Linear(2, 2)
    assert is_compiled(torch.compile(model)) and not is_compiled(model), (
        "torch.compile gives no torch._dynamo.eval_frame.OptimizedModule: runtime/module.py refuses those"
    )


def test_state_is_told_from_inputs() -> None:
    found: list[list[bool]] = []

    def backend(graph: Any, examples: Any) -> Any:
        found.append([is_state(node) for node in graph.graph.find_nodes(op="placeholder")])
        return graph.forward

    model = nn.BatchNorm1d(3).eval()
    torch.compile(model, backend=backend)(torch.ones(2, 3))
    assert sum(found[0]) >= 2 and not all(found[0]), (
        "placeholders have no _dynamo_static_input_type: fxopt/integrations/dynamo.py takes buffers for inputs by it"
    )


def test_a_trace_can_be_left() -> None:
    seen: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        with tracing(None):
            seen.append(torch._guards.TracingContext.try_get())
        return graph.forward

    torch.compile(torch.sin, backend=backend)(torch.ones(2))
    assert seen == [None], "torch._guards.tracing(None) leaves no trace: fxopt/runtime/traced.py captures within Dynamo"
