"""fxopt: an FX graph-rewriting optimizer for DLRM-style recommendation models.

    model = fxopt.optimize(model)
    print(fxopt.report(model))

Importing it costs a millisecond over torch; the tracing machinery (sympy, 1 s) is imported at the first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn

from fxopt.config import Config

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from fxopt import optimizers
    from fxopt.packages import Package
    from fxopt.report.data import Report

__version__ = "0.1.0"
__all__ = ["Config", "export", "load", "optimize", "optimizers", "report"]


def __getattr__(name: str) -> ModuleType:
    if name == "optimizers":
        return importlib.import_module("fxopt.optimizers")
    raise AttributeError(f"module 'fxopt' has no attribute {name!r}")


def optimize(model: nn.Module, example_inputs: tuple | None = None, config: Config = Config()) -> nn.Module:
    """A drop-in for `model` that computes the same, faster: see :func:`fxopt.optimize.optimize`."""
    from fxopt.optimize import optimize

    return optimize(model, example_inputs, config)


def export(model: nn.Module, example_inputs: Any, dynamic: Any = True, config: Config | None = None) -> ExportedProgram:
    """The optimized graph as a program that runs without Python: see :func:`fxopt.export.export`."""
    from fxopt.export import export

    return export(model, example_inputs, dynamic, config)


def load(package: str | Path, kernels: str | Path) -> Package:
    """A package of :func:`fxopt.export.package` as a function: see :func:`fxopt.packages.load`."""
    from fxopt.packages import load

    return load(package, kernels)


def report(
    model: nn.Module,
    inputs: Mapping[int, tuple] | None = None,
    *,
    training: bool = False,
    compare: Sequence[str] = (),
) -> Report:
    """What was done to an optimized model, and, on `inputs` (batch size to arguments), what it gained.

    `print` shows it; `to_html()`, `to_json()` and `to_dict()` give it to others. `training` measures training steps;
    `compare=("torch.compile",)` times that as well. See :func:`fxopt.report.collect.report`.
    """
    from fxopt.report.collect import report

    return report(model, inputs, training=training, compare=compare)
