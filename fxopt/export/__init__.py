"""The optimized graph as a program that runs without fxopt's Python: for torch.export, AOTInductor and C++."""

from fxopt.callable_module import make_callable
from fxopt.export.errors import ExportError
from fxopt.export.package import package
from fxopt.export.program import export

__all__ = ["ExportError", "export", "package"]


make_callable(__name__, export)
