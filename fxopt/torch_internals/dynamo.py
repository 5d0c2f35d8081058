"""torch.compile's front half: who traces now, how to leave its trace, and what it says of a graph's inputs."""

from __future__ import annotations

import sys
from types import CodeType

from torch import compiler, nn
from torch._guards import tracing
from torch.fx import Node


def is_exporting() -> bool:
    """Whether torch.export traces. (Its public name in torch 2.11 is True whenever Dynamo traces.)"""
    return compiler._is_exporting_flag


def is_compiled(model: nn.Module) -> bool:
    """Whether `model` is what torch.compile made of another."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds, and who compiles has done it
    return dynamo is not None and isinstance(model, dynamo.OptimizedModule)


def traces_alone(code: CodeType) -> bool:
    """Whether Dynamo's trace, which runs in this thread, began in a frame of `code`, and may end without a graph."""
    from torch._dynamo.symbolic_convert import InstructionTranslator  # who traces has imported it

    tracer = InstructionTranslator.current_tx()
    return tracer.f_code is code and not tracer.one_graph


def is_state(node: Node) -> bool:
    """Whether a placeholder of Dynamo's graph is a parameter or buffer, or was marked to be taken for one."""
    return (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type") is not None
