"""The pipeline on one screen: capture > normalize > rewrite > verify > runtime (its stages: stages.py)."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fxopt import progress
from fxopt.asked import arguments_of, check
from fxopt.autocast import Autocast
from fxopt.callable_module import make_callable
from fxopt.capture import Capture, capture
from fxopt.capture.settings import kept
from fxopt.config import Config
from fxopt.dump import Dump
from fxopt.rewrites.framework.core import Fuel
from fxopt.runtime import Executable, dispatcher_of, optimized
from fxopt.runtime.cuda_graphs import graphed
from fxopt.runtime.native import build_ahead
from fxopt.runtime.sharded.communication import inner
from fxopt.stages import examples_of, lowered, raced, rewrite, take_pieces, take_turns, verified
from fxopt.torch_internals.shape_env import forget_answers
from fxopt.tune.tuner import Tuner

_log = logging.getLogger(__name__)


def optimize(
    model: nn.Module, example_inputs: Tensor | Sequence | Mapping | None = None, config: Config = Config()
) -> nn.Module:
    """A drop-in for `model` that computes the same, faster.

    Args:
        model: any nn.Module, or an ``ExportedProgram``. It shares its parameters, buffers and attributes with the
            result, and still runs eagerly by itself.
        example_inputs: arguments to capture now: a tuple of positional ones, a dict of keyword arguments or one
            tensor. A model in eval mode is captured as it is served, without gradients. Without example inputs each
            input signature is captured at its first call.
        config: see :class:`fxopt.Config`.

    Returns:
        A module of a subclass of ``type(model)``; of that very type where TorchRec knows it by that. A wrapper (DDP,
        DistributedModelParallel) is returned itself, around an optimized model. What cannot be optimized stays as it
        was; ``fxopt.report`` says why.

    Raises:
        TypeError: `model` is neither an nn.Module nor an ExportedProgram, or the example inputs are none.
        ValueError: `config` names what is not there, or the model has example inputs and no values (device meta).
    """
    if isinstance(model, torch.export.ExportedProgram):
        model = model.module()
    if (wrapped := inner(model)) is not None:
        wrapper, name = wrapped
        wrapper._modules[name] = optimize(wrapper.get_submodule(name), example_inputs, config)
        return model
    result = optimized(model, functools.partial(compile, config), config)
    check(model, config)
    if example_inputs is not None:
        with torch.set_grad_enabled(model.training and torch.is_grad_enabled()):
            dispatcher_of(result).prepare(*arguments_of(model, example_inputs))
    return result


def compile(
    config: Config, model: nn.Module, args: tuple, kwargs: dict[str, Any], earlier: Sequence[Capture] = ()
) -> Executable:
    """One input signature of one model, from capture to something that runs.

    Args:
        earlier: captures of the model that do not serve these inputs.

    Raises:
        CaptureError: the model stays eager for these inputs.
    """
    with progress.on_terminal(config.progress):
        try:
            executable = kept(lambda: _compiled(config, model, args, kwargs, earlier))
        finally:
            forget_answers()
        progress.step("compile the checks of a call")
        build_ahead().join()
        return executable


def _compiled(
    config: Config, model: nn.Module, args: tuple, kwargs: dict[str, Any], earlier: Sequence[Capture]
) -> Executable:
    clock = _Clock()
    progress.step("capture")
    captured = capture(model, args, kwargs, config, earlier)
    clock.lap("capture")
    with Autocast(None):
        return _made_of(captured, model, args, kwargs, config, clock)


def _made_of(
    captured: Capture, model: nn.Module, args: tuple, kwargs: dict[str, Any], config: Config, clock: _Clock
) -> Executable:
    for node, slot in zip(captured.graph.graph.find_nodes(op="placeholder"), captured.state, strict=False):
        node.meta["tensor"] = functools.partial(_read, slot.read, weakref.ref(model))  # what a rewrite is timed on
    tuner = Tuner(config.tune)
    executable = rewrite(captured, config, Fuel(config.max_rewrites), tuner, Dump(config.dump))
    clock.lap("rewrite")
    progress.step("compare with eager")
    examples = examples_of(captured, model, args, kwargs, config)
    executable = verified(executable, examples, config, tuner)
    clock.lap("verify")
    progress.step("race against the captured graph")
    executable = raced(executable, model, args, kwargs, examples, config, tuner)
    clock.lap("race")
    tuner.save()
    take_pieces(executable, examples, config, functools.partial(_piece, model, config))
    clock.lap("pieces")
    if config.lower == "inductor":
        progress.step("compile with Inductor")
        executable = lowered(executable, examples)
        clock.lap("lower")
    executable.run = graphed(executable, config.cuda_graphs)
    take_turns(executable, config, tuner)
    if captured.autocast is not None:
        executable.run = _without_autocast(executable.run)
    executable.findings.seconds = clock.laps
    executable.model = model
    found = executable.findings
    operators = f"{found.operators_before} -> {found.operators_after} operators"
    _log.info("%s: %s in %.1f s for %s", type(model).__name__, operators, sum(clock.laps.values()), found.signature)
    return executable


def _read(read: Callable[[nn.Module], Any], model: weakref.ref[nn.Module]) -> Any:
    """A tensor of the model; None once that is gone. Nodes are in cycles, so they hold the model weakly."""
    return None if (held := model()) is None else read(held)


def _piece(model: nn.Module, config: Config, part: nn.Module) -> nn.Module:
    """A drop-in for a part of `model`, in which the leaves have the names that the part has for them."""
    leaves = {model.get_submodule(path) for path in config.leaves}
    named = tuple(path for path, module in part.named_modules() if module in leaves)
    return optimize(part, config=replace(config, dump=None, leaves=named))


def _without_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def plain(*tensors: Any) -> Any:
        with Autocast(None):
            return run(*tensors)

    return plain


class _Clock:
    """Wall time by stage."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.laps[stage], self._last = now - self._last, now


make_callable(__name__, optimize)
