"""What torch.compile and torch.export tell those who are traced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fxopt.torch_internals.dynamo import (
    MARK,
    adds_attributes,
    as_written,
    force_eager,
    is_compiled,
    is_exporting,
    is_state,
    set_stance,
    tracing,
    watch_frames,
)


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


def test_the_mark_of_torch_compile() -> None:
    model = nn.Linear(2, 2)
    before = vars(model).keys()
    names = set(before)
    torch.compile(model, backend="eager")
    assert vars(model).keys() - names <= {MARK}, "torch.compile marks modules by another name: fxopt/runtime/traced.py"


def test_nothing_is_compiled_by_force() -> None:
    compiles: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        compiles.append(graph)
        return graph.forward

    compiled = torch.compile(torch.sin, backend=backend)
    stance = force_eager()
    try:
        compiled(torch.ones(2))
        assert not compiles, (
            "the stance 'force_eager' is not torch._dynamo.eval_frame._stance: fxopt/capture/uncompiled.py"
        )
    finally:
        set_stance(stance)
    compiled(torch.ones(2))
    assert len(compiles) == 1


def test_frames_are_shown_to_one() -> None:
    assert watch_frames(None) is None and watch_frames(None) is None, "torch._C._dynamo.eval_frame.set_eval_frame"


def test_functions_are_told_as_they_are_written() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x

    for wrap in (torch.compile, torch.compiler.disable):
        assert as_written(wrap(function)) is function, "torch wraps a function under another name: fxopt/reach/"
    assert as_written(function) is function


def test_attributes_that_a_trace_adds() -> None:
    model, found = nn.Linear(2, 2), list[bool]()

    @torch.compiler.assume_constant_result
    def look() -> int:
        found.append(adds_attributes([model]))
        return 0

    def code(x: torch.Tensor, name: str) -> torch.Tensor:
        setattr(model, name, False)
        return model(x) + look()

    for name in ("training", "another"):
        torch._dynamo.reset()
        torch.compile(code, backend="eager")(torch.ones(2), name)
    assert found == [False, True], "Dynamo keeps what a trace changes elsewhere: fxopt/runtime/traced.py"
