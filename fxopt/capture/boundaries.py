"""What an opaque submodule and the code around it may share: arguments, results and tensors, but no attribute.

A leaf runs at each call, on the model's own modules. The code around it ran once, on copies, while it was traced. So an
attribute that one of the two changes and the other one uses would hold another value than in eager. Such code stops
the capture. A hook that keeps what a layer returns is the usual case: its layer is a leaf.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from torch import nn

from fxopt.capture.errors import CaptureError
from fxopt.capture.mirror import Mirror
from fxopt.capture.state import HOOKS, ModelCopy

INSTALLED = {"forward", *HOOKS}  # what a stub for a leaf changes by itself
_APART = vars(nn.Module()).keys() - {"training"} | INSTALLED
_MISSING = object()


class Before:
    """What the attributes and buffers of all modules hold in front of a call of a leaf."""

    def __init__(self, copy: ModelCopy):
        self._mirror = Mirror(lambda tensor: tensor)
        self._modules = [(path, copy.at(path)) for path in copy.paths.values()]
        self._values = [_values(module) for _, module in self._modules]
        self._kept = [{name: self._mirror.mirror(held) for name, held in values.items()} for values in self._values]

    def changed(self) -> Iterator[tuple[str, str]]:
        """The path of the module and the name of each that is another one now, or holds something else."""
        for (path, module), before, kept in zip(self._modules, self._values, self._kept, strict=True):
            now = _values(module)
            for name in now.keys() | before.keys():
                value = now.get(name, _MISSING)
                if value is not before.get(name, _MISSING) or not self._mirror.same(value, kept[name]):
                    yield path, name


def forbid(copy: nn.Module, path: str, names: set[str]) -> None:
    """From now on, code that uses these attributes of a copied module stops the capture: a leaf changes them."""
    kind = type(copy)

    def refuse(name: str) -> NoReturn:
        raise CaptureError(
            f"forward uses the attribute {name!r} of {path or 'the model'}, which a submodule that stays opaque changes"
        )

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        refuse(name) if name in names else kind.__setattr__(module, name, value)

    reading = {name: property(functools.partial(lambda name, module: refuse(name), name)) for name in names}
    copy.__class__ = type(kind.__name__, (kind,), {**reading, "__setattr__": set_attribute})


def demand_unchanged(copy: ModelCopy, path: str, modules: Iterable[nn.Module]) -> None:
    """In front of a call of the leaf at `path`, which reads what these modules of the model hold.

    Raises:
        CaptureError: the code around it has set an attribute.
    """
    for module in modules:
        if names := copy.changes(module) - INSTALLED:
            where = copy.paths[id(copy.of(module))] or "the model"
            raise CaptureError(f"sets {min(names)!r} of {where}, which {path} may read, and that stays opaque")


def _values(module: nn.Module) -> dict[str, Any]:
    return {**{name: held for name, held in vars(module).items() if name not in _APART}, **module._buffers}
