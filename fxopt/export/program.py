"""From a model to a torch.export.ExportedProgram that holds its optimized graph."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram, ShapesCollection

from fxopt import trees
from fxopt.asked import arguments_of
from fxopt.capture.effects import StoreAttribute, stores_of
from fxopt.capture.guards import Guards
from fxopt.config import Config
from fxopt.export.errors import ExportError, obstacles, path_in
from fxopt.export.sizes import dynamic_dims, guards_of, sample_sizes
from fxopt.kernels.operators import definitions_on
from fxopt.optimize import optimize
from fxopt.runtime import Executable, dispatcher_of
from fxopt.runtime.context import ambient
from fxopt.torch_internals.exporting import demanding, exported


def export(model: nn.Module, example_inputs: Any, dynamic: Any = True, config: Config | None = None) -> ExportedProgram:
    """The optimized graph of a model, in its mode (train or eval) and without gradients, as a program.

    The program calls fxopt's operators, so a process needs their kernels: those of an imported fxopt, or the library
    that ``python -m fxopt build --bundle`` writes. Its parameters and buffers have the model's own names. It sets no
    attributes of modules.

    Args:
        model: an nn.Module, or one that :func:`fxopt.optimize` has made.
        example_inputs: as of :func:`fxopt.optimize`. The program takes its arguments as these were given.
        dynamic: True: the program takes all sizes that the optimized graph takes. False: those of the example alone.
            Else ``dynamic_shapes`` as of ``torch.export.export``.
        config: as of :func:`fxopt.optimize`; by default the one that `model` was optimized with.

    Raises:
        ExportError: the model, or a part of it, cannot be captured, or does what a program cannot do; the text says
            what, with the module path and the source line.
    """
    fast = _optimized(model, config)
    original = dispatcher_of(fast).original
    with torch.no_grad():
        args, kwargs = arguments_of(original, example_inputs)
        executable = _captured(fast, args, kwargs)
        for reason in obstacles(original, executable.capture):
            raise ExportError(f"this model cannot be exported: {reason}")
        for store in stores_of(executable.capture.graph):
            warnings.warn(f"the program does not set {path_in(original, store.module)}.{store.name}", stacklevel=2)
        return _traced(original, executable, args, kwargs, dynamic)


def _optimized(model: nn.Module, config: Config | None) -> nn.Module:
    """With a runtime of its own, since the program may want other settings than the process."""
    if config is None:
        try:
            config = dispatcher_of(model).config
        except TypeError:
            config = Config()
    if config.lossy:
        raise ExportError("a program has no compressed weights: pass Config() with the precision fp32 and no low_rank")
    return optimize(model, config=replace(config, lower="fx", cuda_graphs=False))


def _captured(fast: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Executable:
    dispatcher = dispatcher_of(fast)
    dispatcher.prepare(args, kwargs)
    found = next((entry for entry in dispatcher.entries if entry.match(args, kwargs, ambient()) is not None), None)
    if found is None or found.executable is None:
        reasons = [findings.eager_reason for findings in dispatcher.findings if findings.eager_reason]
        raise ExportError(f"this model cannot be captured: {'; '.join(reasons)}")
    return found.executable


def _traced(
    model: nn.Module, executable: Executable, args: tuple, kwargs: dict[str, Any], dynamic: Any
) -> ExportedProgram:
    capture = executable.capture
    leaves, spec = trees.flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sizes, shapes = [tuple(tensor.shape) for tensor in tensors], dynamic
    if dynamic is True:
        sizes, shapes = sample_sizes(capture, sizes), ShapesCollection()
    samples = [torch.zeros(n, dtype=t.dtype, device=t.device) for n, t in zip(sizes, tensors, strict=True)]
    if dynamic is True:
        for sample, dims in zip(samples, dynamic_dims(capture), strict=True):
            shapes[sample] = dims
    rest = iter(samples)
    sample_args, sample_kwargs = trees.unflatten(
        [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
    )
    program = _Program.of(model, executable, guards_of(model, executable, tensors))
    device = next((slot.read(model).device for slot in capture.state), torch.device("cpu"))
    try:
        return exported(program, sample_args, sample_kwargs, shapes or None, definitions_on(device.type))
    except Exception as error:
        raise ExportError(f"torch.export cannot trace the optimized graph: {error}") from error


class _Program(nn.Module):
    """The model's own state under its own names, and a forward that runs the optimized graph."""

    @staticmethod
    def of(model: nn.Module, executable: Executable, guards: Guards) -> _Program:
        program = object.__new__(_Program)
        vars(program).update(vars(model))
        vars(program)["forward"] = functools.wraps(model.forward)(_forward(program, executable, guards))
        return program


def _forward(program: nn.Module, executable: Executable, guards: Guards) -> Callable[..., Any]:
    capture, graph = executable.capture, executable.graph
    assert graph is not None

    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in trees.leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        with demanding():
            if not guards.holds(tensors):
                raise ExportError(f"expected sizes with {guards.describe()}")
        results = _WithoutStores(graph).run(*capture.state_of(program), *tensors)
        return trees.unflatten(list(results), capture.out_spec)

    return forward


class _WithoutStores(fx.Interpreter):
    """A graph without the attributes that it assigns, which no forward reads."""

    def call_module(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if not isinstance(self.fetch_attr(target), StoreAttribute):
            super().call_module(target, args, kwargs)
