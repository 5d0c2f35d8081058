"""The drop-in module and the dispatch of its calls to captures."""

from fxopt.runtime.executable import Compile, Executable
from fxopt.runtime.module import OptimizedMixin, dispatcher_of, optimized
from fxopt.runtime.parallel import drop_in

__all__ = ["Compile", "Executable", "OptimizedMixin", "dispatcher_of", "drop_in", "optimized"]
