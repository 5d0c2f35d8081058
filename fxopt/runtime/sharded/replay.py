"""A cut compared with the call that it was made from, on what the boundaries returned there: nothing communicates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxopt import trees
from fxopt.capture.untouched import Look, looked
from fxopt.runtime.flatten import is_constant
from fxopt.runtime.sharded.cut import Cut, live_reads
from fxopt.runtime.sharded.division import Division
from fxopt.runtime.sharded.trace import Hosts, NotTraced
from fxopt.runtime.undo import random_states

_NEAR = 1e-4  # the same operators on the same values: another branch of the model differs by more


class Call:
    """One call of a model: its arguments, what its boundaries returned, and what it returned.

    Attributes:
        constants: by position or name, the arguments that are part of the form of the call.
        values: the others.
        results: by path of a boundary, what it returned at each of its calls; what has arrived, if it is awaited.
    """

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self._named: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}  # type: ignore[dict-item]
        self.constants = {name: value for name, value in self._named.items() if is_constant(value)}
        self.values = [value for name, value in self._named.items() if name not in self.constants]
        self.results: dict[str, list[Any]] = {}
        self.returned: Any = None
        self.random: list[tuple[Callable[[Tensor], None], Tensor]] = []

    def begin(self) -> None:
        """Keeps the random states."""
        self.random = random_states()

    def read(self, origin: Sequence[int | str]) -> Any:
        """An argument, or what its attributes lead to."""
        value = self._named[origin[0]]
        for name in origin[1:]:
            value = getattr(value, str(name), None)
        return value


def check(hosts: Hosts, division: Division, call: Call) -> None:
    """Runs the cut on copies of the call's own values.

    Raises:
        NotTraced: it returns something else.
    """
    replays = {path: _Replay(results) for path, results in call.results.items()}
    cut = Cut(hosts, {**division.modules, **live_reads(hosts, division), **replays}, call.results)
    look, recorded = Look(), torch.is_grad_enabled()
    root = look.copy(cut.module(cut.segments)).root
    try:
        with torch.random.fork_rng(), torch.inference_mode(False), torch.set_grad_enabled(recorded):
            for put_back, state in call.random:
                put_back(state)
            found = looked(look, root, *look.own_inputs(call.values))
    except Exception as error:
        raise NotTraced(f"its trace raises {type(error).__name__}: {error}") from error
    expected, found = trees.flatten(call.returned), trees.flatten(found)
    if expected[1] != found[1] or not all(map(_same, expected[0], found[0])):
        raise NotTraced("its trace returns something else: does the forward decide by values?")


def _same(expected: Any, found: Any) -> bool:
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return is_constant(expected) and bool(expected == found)
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    return torch.allclose(expected.detach(), found.detach(), rtol=_NEAR, atol=_NEAR, equal_nan=True)


class _Replay(nn.Module):
    """Stands for a boundary, and returns what it returned."""

    def __init__(self, results: Sequence[Any]) -> None:
        super().__init__()
        self.results = list(results)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.results.pop(0)
