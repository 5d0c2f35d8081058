"""torch.export on a module, with sizes of 0 and 1 taken as any other size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from unittest import mock

import sympy
import torch
from sympy.core.relational import Relational
from torch import SymBool, SymFloat, SymInt, Tensor, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx.experimental import _config as symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fxopt.torch_internals.storage import storage_number
from fxopt.torch_internals.symbols import never_negative

_demanding = ContextVar("demanding", default=False)


class ProgramShapeEnv(ShapeEnv):
    """Answers from its examples, without a guard, that sizes are unequal, not empty and not 1: operators ask for it to
    choose strides. What a program has to demand is asked within :func:`demanding`.
    """

    def evaluate_expr(self, orig_expr: sympy.Basic, *args: Any, **kwargs: Any) -> Any:
        if not _demanding.get() and isinstance(orig_expr, Relational):
            with self.suppress_guards():
                answer = super().evaluate_expr(orig_expr, *args, **kwargs)
            about_equality = isinstance(orig_expr, (sympy.Eq, sympy.Ne))
            if (answer == isinstance(orig_expr, sympy.Ne)) if about_equality else {0, 1} & set(orig_expr.args):
                return answer
        return super().evaluate_expr(orig_expr, *args, **kwargs)


def either_of(condition: Any, true: Callable[..., Any], false: Callable[..., Any], inputs: tuple) -> Any:
    """torch.cond, which gives its branches sizes of 1 as those that they are, on tensors, sizes and constants. It is
    `true` alone within another branch, which Dynamo traces, and for inputs that torch.cond cannot take: tensors that
    share memory, and numbers that are no size of a tensor at some call."""
    if torch.compiler.is_dynamo_compiling():
        return true(*inputs)
    values, spec = tree_flatten(inputs)
    tensors = [value for value in values if isinstance(value, Tensor)]
    if _share_memory(tensors) or any(map(_is_no_size, values)):
        return true(*inputs)
    # torch.cond takes tensors alone, and Dynamo no number from around a branch: a size comes as that of an empty tensor
    given = [value for value in values if isinstance(value, (Tensor, SymInt))]
    operands = [tensors[0].new_empty((value, 0)) if isinstance(value, SymInt) else value for value in given]
    if_true, if_false = [_of_operands(function, values, spec) for function in (true, false)]
    with symbolic_shapes.patch(backed_size_oblivious=False):  # type: ignore[attr-defined]
        return torch.cond(condition, if_true, if_false, tuple(operands))


def _of_operands(function: Callable[..., Any], values: Sequence[Any], spec: TreeSpec) -> Callable[..., Any]:
    """The function of tensors and of those that stand for sizes; all other values are the constants that they are."""
    constants = [None if isinstance(value, (Tensor, SymInt)) else value for value in values]
    places = [place for place, value in enumerate(values) if isinstance(value, (Tensor, SymInt))]
    sizes = {place for place, value in enumerate(values) if isinstance(value, SymInt)}

    def branch(*operands: Tensor) -> Any:
        found = list(constants)
        for place, operand in zip(places, operands, strict=True):
            found[place] = operand.shape[0] if place in sizes else operand
        return function(*tree_unflatten(found, spec))

    return branch


def _is_no_size(value: Any) -> bool:
    return isinstance(value, (SymBool, SymFloat)) or (isinstance(value, SymInt) and not never_negative(value))


def _share_memory(tensors: Sequence[Tensor]) -> bool:
    return len(set(map(storage_number, tensors))) < len(tensors)


@contextmanager
def demanding() -> Iterator[None]:
    """What is asked about sizes in here becomes a constraint of the program."""
    token = _demanding.set(True)
    try:
        yield
    finally:
        _demanding.reset(token)


def exported(
    module: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    definitions: Mapping[OpOverload, Callable[..., Any]],
) -> ExportedProgram:
    """The module as a program, with calls of the operators in `definitions` replaced by what these compute."""
    oblivious = symbolic_shapes.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with oblivious, mock.patch("torch._export.non_strict_utils.ShapeEnv", ProgramShapeEnv):
        program = torch.export.export(
            module,
            args,
            kwargs,
            dynamic_shapes=dynamic_shapes,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
        called = {node.target for inner in _graphs(program) for node in inner.graph.nodes}
        table = {operator: definition for operator, definition in definitions.items() if operator in called}
        return program.run_decompositions(table) if table else program


def _graphs(program: ExportedProgram) -> Iterator[torch.fx.GraphModule]:
    return (each for each in program.graph_module.modules() if isinstance(each, torch.fx.GraphModule))


def packaged(program: ExportedProgram, path: str, c_shims: dict[OpOverload, list[str]], notes: dict[str, str]) -> str:
    """AOTInductor's package of a program, in which operators with a C shim, by their declarations, are that call."""
    from torch._inductor import aoti_compile_and_package  # it takes seconds to import

    configs = {"aot_inductor.custom_ops_to_c_shims": c_shims, "aot_inductor.metadata": notes}
    return aoti_compile_and_package(program, package_path=path, inductor_configs=configs)
