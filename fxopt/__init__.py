"""fxopt: an FX graph-rewriting optimizer for DLRM-style recommendation models.

model = fxopt.optimize(model)
print(fxopt.report(model))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxopt.config import Config

if TYPE_CHECKING:
    from fxopt.optimize import optimize
    from fxopt.report import report

__version__ = "0.1.0"
__all__ = ["Config", "optimize", "report"]


def __getattr__(name: str) -> Any:
    """Tracing machinery is imported with the first use: `import fxopt` costs next to nothing over torch."""
    if name == "optimize":
        from fxopt.optimize import optimize

        return optimize
    if name == "report":
        from fxopt.report import report

        return report
    raise AttributeError(f"module 'fxopt' has no attribute {name!r}")
