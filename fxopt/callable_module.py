"""Two public functions share their names with the modules that hold them: `fxopt.optimize` and `fxopt.report`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def make_callable(module: str, function: Callable[..., Any]) -> None:
    """Calling `module` calls `function`, since importing a submodule rebinds its name in the package."""
    called = type("CallableModule", (ModuleType,), {"__call__": staticmethod(function), "__doc__": function.__doc__})
    sys.modules[module].__class__ = called
