"""Capture an nn.Module: rounds of attempts, each with the submodules that stopped the last one as leaves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fxopt.capture.attempts import Attempts, Stopped
from fxopt.capture.captured import Capture
from fxopt.capture.entered import entering_none
from fxopt.capture.errors import CaptureError
from fxopt.capture.inputs import flatten
from fxopt.capture.leaves import Leaf, Trial
from fxopt.capture.lengths import alike, varied
from fxopt.capture.questions import question_of
from fxopt.capture.reach import Reach
from fxopt.capture.state import of_other_kinds
from fxopt.capture.trial import trial as run_trial
from fxopt.config import Config
from fxopt.findings import Place
from fxopt.torch_internals.hooks import has_hooks
from fxopt.tracebacks import let_go

MAX_ROUNDS = 8
ASKED = 4  # captures for answers to how much there is to cut, before cuts are terms: 8 sequences have 256 answers


def capture(
    model: nn.Module,
    args: tuple = (),
    kwargs: dict | None = None,
    config: Config = Config(),
    earlier: Sequence[Capture] = (),
) -> Capture:
    """Capture `model(*args, **kwargs)` for every batch size and every multi-hot length.

    Sizes that look like layouts are fixed, but for those of which `earlier` captures tell otherwise (see lengths.py).

    Submodules that cannot be captured (config.leaves, hooks, TorchScript, data-dependent Python, attributes that carry
    values from call to call) become leaves.

    Raises:
        CaptureError: the model itself cannot be captured; names the line that stopped it.
        Exception: what the model raises for these inputs in eager mode.
    """
    kwargs = kwargs or {}
    inputs = flatten(args, kwargs)
    reach = Reach(model)
    if reach.once:
        raise CaptureError(f"forward may {reach.once}")
    takes_answers = not any(each.refuted for each in earlier)
    earlier = alike(earlier, inputs)
    leaves = _known_leaves(model, config, bool(reach.question))
    for _ in range(MAX_ROUNDS):
        with entering_none(reach.barred):
            trial = run_trial(model, _outermost(leaves), args, kwargs) if leaves else Trial()
        asks = len(earlier) < ASKED
        attempts = Attempts(model, inputs, leaves, trial, reach, varied(earlier, inputs), asks, takes_answers)
        try:
            return attempts.first()
        except Stopped as stop:
            leaves.update(stop.found)
            if "" in leaves:
                with entering_none(reach.barred):  # if the inputs do not fit, the model's own error is better
                    run_trial(model, set(), args, kwargs)
                raise CaptureError(leaves[""].reason, leaves[""].place) from stop.__cause__
            let_go(stop)
        finally:
            attempts.end()
    last = list(leaves.values())[-1]
    raise CaptureError(f"more than {MAX_ROUNDS} submodules stop the capture, the last one: {last.reason}", last.place)


def _known_leaves(model: nn.Module, config: Config, asks: bool) -> dict[str, Leaf]:
    leaves = {}
    for path, module in model.named_modules():
        reason = (
            "named in Config.leaves" if path in config.leaves
            else "TorchScript" if isinstance(module, torch.jit.ScriptModule)
            else "has forward or backward hooks" if has_hooks(module)
            else other if path and (other := of_other_kinds(path, module))
            else question if asks and (question := question_of(module))
            else ""
        )  # fmt: skip
        if reason:
            leaves[path] = Leaf(path, reason, Place(path))
    unknown = set(config.leaves) - leaves.keys()
    if unknown:
        raise ValueError(f"Config.leaves: expected paths of named_modules(), found {sorted(unknown)}")
    if "" in leaves:
        raise CaptureError(f"the model itself {leaves[''].reason}")
    return leaves


def _outermost(leaves: dict[str, Leaf]) -> set[str]:
    return {path for path in leaves if not any(path != p and path.startswith(p + ".") for p in leaves)}
