"""Where a node or an error comes from in the user's code, read from Python's stack.

Walking raw frames costs about 2 us a node; torch's own stack traces format every line and cost 100 times that.
"""

from __future__ import annotations

import linecache
import os
import sys
from types import CodeType, FrameType, TracebackType

import torch
from torch import nn

from fxopt.findings import Place
from fxopt.names import is_users

_OWN = os.path.dirname(os.path.abspath(__file__))
_ABOVE = os.path.join(_OWN, "attempts.py")  # calls the model: frames further out are not the model's
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PACKAGE = os.path.dirname(_OWN) + os.sep
_PYTHON = os.path.dirname(os.path.abspath(linecache.__file__)) + os.sep
_is_user: dict[str, bool] = {}  # by file: the hash of a code object takes 2 us


def is_user_code(code: CodeType) -> bool:
    """Whether `code` is neither torch's, Python's own, this package's nor generated."""
    name = code.co_filename
    known = _is_user.get(name)
    if known is None:
        python = name.startswith(_PYTHON) and "site-packages" not in name
        known = _is_user[name] = not python and not name.startswith(("<", _TORCH, _PACKAGE))
    return known


def module_of(frame: FrameType) -> nn.Module | None:
    """The module whose method runs in `frame`."""
    code = frame.f_code
    if code.co_argcount and code.co_varnames[0] == "self":
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            return owner
    return None


class Places:
    """Finds the place of the code that runs now.

    Args:
        paths: module path of each module under trace, by id (the traced copies).
    """

    def __init__(self, paths: dict[int, str]):
        self._paths = paths

    def here(self, depth: int = 2) -> Place:
        module = line = None
        path = ""
        frame: FrameType | None = sys._getframe(depth)
        while frame is not None and (module is None or line is None) and frame.f_code.co_filename != _ABOVE:
            if module is None:
                owner = module_of(frame)
                if owner is not None:
                    module = self._paths.get(id(owner))
            if line is None and is_user_code(frame.f_code):
                path = frame.f_code.co_filename
                line = f"{os.path.basename(path)}:{frame.f_lineno}"
            frame = frame.f_back
        return Place(module or "", line or "", path)

    def of_user(self) -> Place:
        """That of the user's code that has called our caller, perhaps through libraries such as NumPy."""
        depth, frame = 2, sys._getframe(2)
        while frame.f_code.co_filename != _ABOVE and frame.f_back and not is_users(frame.f_globals.get("__name__")):
            depth, frame = depth + 1, frame.f_back
        return self.here(depth + 1)

    def of_error(self, error: BaseException) -> tuple[str, Place, str]:
        """The innermost traced module on the error's traceback: (its path, the place, the source text there)."""
        path, line, file, source = "", "", "", ""
        trace: TracebackType | None = error.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            owner = module_of(frame)
            if owner is not None and id(owner) in self._paths:
                path = self._paths[id(owner)]
            if is_user_code(frame.f_code):
                file = frame.f_code.co_filename
                line = f"{os.path.basename(file)}:{trace.tb_lineno}"
                source = linecache.getline(file, trace.tb_lineno).strip()
            trace = trace.tb_next
        return path, Place(path, line, file), source
