"""What an opaque submodule and the code around it may share: arguments, results and tensors, but no attribute.

A leaf runs at each call, on the model's own modules. The code around it ran once, on copies, while it was traced. So an
attribute that one of the two changes and the other one uses would hold another value than in eager. Such code stops
the capture. A hook that keeps what a layer returns is the usual case: its layer is a leaf.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from torch import nn

from fxopt.capture.errors import CaptureError
from fxopt.capture.mirror import ATOMS, Mirror
from fxopt.capture.state import ModelCopy
from fxopt.torch_internals.hooks import HOOKS

INSTALLED = {"forward", *HOOKS}  # what a stub for a leaf changes by itself
_APART = vars(nn.Module()).keys() - {"training"} | INSTALLED
_MISSING = object()


class Before:
    """What the attributes and buffers of all modules hold in front of a call of a leaf.

    Nearly always all of them hold the same afterwards, so that is found at once: 300 leaves ask 180,000 modules.
    """

    def __init__(self, copy: ModelCopy):
        self._mirror = Mirror(lambda tensor: tensor)
        self._modules = list(copy.modules())
        self._held = self._now()
        self._kept: list[tuple[str, str, Any, Any]] = []  # path, name, what may change by itself, its copy
        for (path, _), own in zip(self._modules, self._held[::2], strict=True):
            for name, held in own.items():
                if type(held) not in ATOMS and name not in _APART and (kept := self._mirror.mirror(held)) is not held:
                    self._kept.append((path, name, held, kept))

    def changed(self) -> Iterator[tuple[str, str]]:
        """The path of the module and the name of each that is another one now, or holds something else."""
        now = self._now()
        if not _are_same(now, self._held):
            for at, (path, _) in enumerate(self._modules):
                before, after = (_values(*held[2 * at : 2 * at + 2]) for held in (self._held, now))
                for name in before.keys() | after.keys():
                    if before.get(name, _MISSING) is not after.get(name, _MISSING):
                        yield path, name
        for path, name, held, kept in self._kept:
            if not self._mirror.same(held, kept):
                yield path, name

    def _now(self) -> list[dict[str, Any]]:
        """Attributes and buffers of each module, in turns."""
        return [dict(held) for _, module in self._modules for held in (vars(module), module._buffers)]


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


def _values(own: dict[str, Any], buffers: dict[str, Any]) -> dict[str, Any]:
    return {**{name: held for name, held in own.items() if name not in _APART}, **buffers}


def _are_same(now: list[dict[str, Any]], before: list[dict[str, Any]]) -> bool:
    """Whether these are the same names, in the same order, for the same objects."""
    values = (itertools.chain.from_iterable(map(dict.values, dicts)) for dicts in (now, before))
    names = (itertools.chain.from_iterable(dicts) for dicts in (now, before))
    return (
        list(map(len, now)) == list(map(len, before))
        and all(map(operator.is_, *values))
        and all(map(str.__eq__, *names))
    )
