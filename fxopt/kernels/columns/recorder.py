"""Training calls on the CPU whose gradients are those of their tables alone, recorded in C++.

A node of Python takes 70 us of a training step, as much as four lookups of eager's; this one takes 10.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import gradients
from ..build import PYTHON_CFLAGS, Library, imported
from ..cache import BuildError
from . import autograd, in_backward, row_gradients

RECORDER = Library("fxopt_recorder", sources=(Path(__file__).with_name("recorder.cpp"),), cflags=PYTHON_CFLAGS)
_gradients = gradients.where_they_flow(autograd.backward)
_plans: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of forward: that of the backward, or None


def record(
    way: Callable[..., list[Tensor] | None], tensors: list[Tensor], tables: list[Tensor], plan: Tensor
) -> list[Tensor] | None:
    """The outputs of `way(tensors, tables, plan)`, with gradients for the tables; None: to be recorded in Python."""
    backward_plan = _plans.get(plan, _plans)
    if backward_plan is _plans:
        backward_plan = _plans[plan] = autograd.plan_of_tables(plan, tables, len(tensors))
    if backward_plan is None or row_gradients.any_wanted(tables) or any(map(in_backward.is_stepped, tables)):
        return None
    module = _module()
    return module.record(way, tensors, tables, plan, backward_plan) if module is not None else None


@functools.cache
def _module() -> ModuleType | None:
    try:
        module = imported(RECORDER)
    except (BuildError, OSError, ImportError):
        return None  # Python serves, and whoever has no compiler is told so for the kernels
    module.define(_by_definition)
    return module


def _by_definition(
    grads: list[Tensor | None], tensors: Sequence[Tensor], tables: Sequence[Tensor], plan: Tensor
) -> list[Tensor | None]:
    """The gradients of the tables where some outputs have none, or where they are differentiated once more.

    tables: leaves of their own, over the same memory.
    """
    needs = [False] * len(tensors), [True] * len(tables), False
    own = [table.requires_grad_() for table in tables]
    context = SimpleNamespace(
        saved_tensors=(plan, *tensors), n_tensors=len(tensors), tables=own, needs_input_grad=needs
    )
    return _gradients(context, grads)[1]
