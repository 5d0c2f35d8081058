"""Findings and measurements as data (`Report`), and how they read."""

import sys
from types import ModuleType

from fxopt.report.collect import report
from fxopt.report.data import Report

__all__ = ["Report", "report"]


class _Callable(ModuleType):
    """Importing this package binds it to the name `fxopt.report`, which is a function to everybody else."""

    __call__ = staticmethod(report)


sys.modules[__name__].__class__ = _Callable
