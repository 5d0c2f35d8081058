"""torch.compile's front half: who traces now, how to leave its trace, how to have nothing compiled, and what it says of
a graph's inputs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import Any

from torch import compiler, nn
from torch._guards import tracing
from torch.fx import Node

MARK = "_is_torch_compile"  # what torch.compile puts on the module that it is given


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


def adds_attributes(modules: Iterable[nn.Module]) -> bool:
    """Whether the code that Dynamo traces in this thread has given one of these modules an attribute that it had not:
    Dynamo does so once all of it has run."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    effects = InstructionTranslator.current_tx().output.side_effects.store_attr_mutations
    edited = ((getattr(variable, "value", None), names) for variable, names in effects.items())
    pending = {id(vars(value)): names for value, names in edited if isinstance(value, nn.Module)}  # a drop-in shares it
    return any(pending.get(id(vars(module)), {}).keys() - vars(module).keys() for module in modules)


def is_state(node: Node) -> bool:
    """Whether a placeholder of Dynamo's graph is a parameter or buffer, or was marked to be taken for one."""
    return (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type") is not None


def force_eager() -> Any:
    """From now on, in all threads, what torch.compile has made runs as it is written. Returns the stance until now."""
    from torch._dynamo import eval_frame

    before, eval_frame._stance = eval_frame._stance, eval_frame.DynamoStance("force_eager")
    return before


def set_stance(stance: Any) -> None:
    """Unlike torch.compiler.set_stance also within what torch.compile has made."""
    from torch._dynamo import eval_frame

    eval_frame._stance = stance


def watch_frames(callback: Any) -> Any:
    """Whom Python shows this thread's frames before they run, None: nobody. Returns whom it showed them until now."""
    from torch._C._dynamo.eval_frame import set_eval_frame

    return set_eval_frame(callback)


def as_written(function: FunctionType) -> Any:
    """What torch.compile, or torch.compiler.disable, has wrapped in this function; the function itself, if nothing."""
    return vars(function).get("_torchdynamo_orig_callable", function)
