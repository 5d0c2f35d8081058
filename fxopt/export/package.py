"""A program compiled by AOTInductor, for C++ and for :func:`fxopt.load`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument
from torch.utils._sympy.numbers import int_oo

from fxopt import trees
from fxopt.export.errors import ExportError
from fxopt.kernels.libraries import c_shims
from fxopt.packages import NOTE, Input, Inputs, Size
from fxopt.torch_internals.exporting import packaged
from fxopt.torch_internals.symbols import expression, static


def package(program: ExportedProgram, path: str | Path) -> str:
    """The path of a package for ``torch::inductor::AOTIModelPackageLoader``, which calls the kernels directly.

    It needs the kernels in its process, as :func:`fxopt.export` says.

    Args:
        program: of :func:`fxopt.export`.
        path: of the package, a ``.pt2`` file.

    Raises:
        ExportError: the program writes buffers, which a package would forget, or has tensors that are not dense.
    """
    if written := _written(program):
        raise ExportError(f"a package keeps no buffers, and this program writes {', '.join(written)}")
    for name, tensor in program.state_dict.items():
        if not trees.is_dense(tensor):
            raise ExportError(f"{name}: expected a dense tensor, found {type(tensor).__name__}, {tensor.layout}")
    return packaged(program, str(path), c_shims(), {NOTE: described(program).text()})


def _written(program: ExportedProgram) -> list[str]:
    """The buffers that it changes."""
    targets = (node.target for node in program.graph.nodes)
    if not any(isinstance(target, OpOverload) and target._schema.is_mutable for target in targets):
        return []
    return sorted(program.run_decompositions({}).graph_signature.buffers_to_mutate.values())


def described(program: ExportedProgram) -> Inputs:
    """What its package notes of the arguments."""
    ranges = {
        str(symbol): (_least(int(found.lower)), None if found.upper == int_oo else int(found.upper))
        for symbol, found in program.range_constraints.items()
    }
    return Inputs(list(_leaves(program)), ranges)


def _least(lower: int) -> int:
    """torch.export says 2 of sizes that may be anything, and takes 0 and 1 all the same."""
    return lower if lower > 2 else 0


def _leaves(program: ExportedProgram) -> Iterator[Input]:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        if spec.kind != InputKind.USER_INPUT:
            continue
        if not isinstance(spec.arg, TensorArgument):
            yield Input(spec.arg.name, value=getattr(spec.arg, "value", None))
            continue
        value = values[spec.arg.name]
        sizes = [_size(size) for size in value.shape]
        yield Input(spec.arg.name, None, str(value.dtype).removeprefix("torch."), value.device.type, sizes)


def _size(size: int | torch.SymInt) -> int | Size:
    """A size that is no multiple of one symbol, with something added, is a symbol of its own."""
    if (known := static(size)) is not None:
        return known
    term = expression(size)
    for symbol in term.free_symbols:
        multiplier, added = term.coeff(symbol, 1), term.coeff(symbol, 0)
        if multiplier.is_Integer and added.is_Integer and term == multiplier * symbol + added:
            return Size(str(symbol), int(multiplier), int(added))
    return Size(str(term), 1, 0)
