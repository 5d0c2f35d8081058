"""A Python file that holds a model by convention: `build_model()` and `example_inputs(batch_size)`."""

from __future__ import annotations

import inspect
import os
import site
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

import fxopt

CONVENTION = "expected a Python file with build_model() and example_inputs(batch_size)"
_OURS = ("<", *(f"{Path(file).resolve().parent}{os.sep}" for file in (torch.__file__, fxopt.__file__)))
_INSTALLED = (f"{Path(os.__file__).parent}{os.sep}", *site.getsitepackages())


class UsageError(Exception):
    """What was given does not follow the convention."""


class ModelError(Exception):
    """The user's own code raised; the message names its line."""


class ModelFile:
    """The file at `path`, imported with its folder on sys.path.

    Args:
        target: "FILE", or "FILE:factory" to build the model with another function than `build_model`.

    Raises:
        UsageError: no such file, or no such function in it.
        ModelError: importing it raised.
    """

    def __init__(self, target: str) -> None:
        self.path, self.factory = _split(target)
        with self._blaming("importing it"):
            module = _imported(self.path)
        self._build = self._function(module, self.factory, "builds the model")
        self._inputs = self._function(module, "example_inputs", "takes a batch size and returns the model's arguments")

    def build(self, device: torch.device | None = None) -> nn.Module:
        """The model in eval mode, on `device` where one is named."""
        with self._blaming(f"{self.factory}()"):
            model = self._build()
        if not isinstance(model, nn.Module):
            raise UsageError(f"{self.path}: {self.factory}() returned {_described(model)}; expected an nn.Module")
        return model.to(device).eval()

    def inputs(self, batch: int, device: torch.device | None = None) -> tuple:
        """The positional arguments for a batch size; their tensors on `device` where one is named."""
        with self._blaming(f"example_inputs({batch})"):
            inputs = self._inputs(batch)
        if not isinstance(inputs, tuple):
            found = f"example_inputs({batch}) returned {_described(inputs)}"
            raise UsageError(f"{self.path}: {found}; expected a tuple of the model's positional arguments")
        return inputs if device is None else tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), inputs)

    def check(self, model: nn.Module, batch: int, inputs: tuple) -> None:
        """Run the eager model once: its own error comes before any of ours."""
        given = ", ".join(map(_described, tree_leaves(inputs)[:4])) + (", ..." if len(tree_leaves(inputs)) > 4 else "")
        with self._blaming("the model", f"It was given example_inputs({batch}): {given}"), torch.no_grad():
            model(*inputs)

    def _function(self, module: ModuleType, name: str, purpose: str) -> Callable[..., Any]:
        found = getattr(module, name, None)
        if callable(found):
            return found
        own = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        there = f"found {', '.join(f'{n}()' for n in own)}" if own else "found no function at all"
        hint = "" if name == "example_inputs" else f"; {self.path.name}:NAME uses another one"
        raise UsageError(f"{self.path} has no {name}(), which {purpose}: {there}{hint}")

    @contextmanager
    def _blaming(self, what: str, remark: str = "") -> Iterator[None]:
        """Turn any error of the user's code into a ModelError with its line."""
        try:
            yield
        except (Exception, SystemExit) as error:
            lines = [f"{self.path}: {what} raised {type(error).__name__}: {error}", *_source(error), remark]
            raise ModelError("\n".join(line for line in lines if line)) from error


def _split(target: str) -> tuple[Path, str]:
    """The file and the factory's name."""
    name, colon, factory = target.rpartition(":")
    if Path(target).exists() or not colon:
        name, factory = target, "build_model"
    path = Path(name)
    if not path.exists():
        raise UsageError(f"no such file: {name}; {CONVENTION}")
    if not path.is_file():
        raise UsageError(f"{name} is a folder; {CONVENTION}")
    if not factory.isidentifier():
        raise UsageError(f"{target}: expected the name of a function after the colon, found {factory!r}")
    return path, factory


def _imported(path: Path) -> ModuleType:
    """The file as a module under its own name, so that other files beside it import the very same one."""
    sys.path.insert(0, str(path.resolve().parent))
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_of_report"
    spec = spec_from_loader(name, SourceFileLoader(name, str(path.resolve())))
    assert spec is not None
    module = sys.modules[name] = module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


def _source(error: BaseException) -> list[str]:
    """The innermost line of the user's own files on the traceback; of another package's where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return [f"  {error.filename}:{error.lineno}", f"    {(error.text or '').strip()}"]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]
    own = [frame for frame in frames if not frame.filename.startswith(_INSTALLED)]
    return [f"  {frame.filename}:{frame.lineno}, in {frame.name}\n    {frame.line}" for frame in (own or frames)[-1:]]


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"a {type(value).__name__}" if value is not None else "None"
