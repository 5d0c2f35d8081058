"""Random generators besides torch's own: Python's, NumPy's, and those that a model or its code holds."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fxopt.reach.code import Code
from fxopt.reach.held import held_by

_KINDS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)


@dataclass(frozen=True)
class _Generator:
    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]


class Generators:
    """The generators that a forward can reach, and the states that they had when this was made."""

    def __init__(self, model: nn.Module) -> None:
        code = Code.behind([model])
        held = [value for value in held_by(model, *code.functions.values()) if isinstance(value, _KINDS)]
        self._generators = [
            _Generator("Python's random module", random.getstate, random.setstate),
            _Generator("NumPy's random state", np.random.get_state, np.random.set_state),
            *map(_of, held),
        ]
        self._states = [generator.get() for generator in self._generators]

    def advanced(self) -> str:
        """The name of the first one that was drawn from since; "" where none was."""
        pairs = zip(self._generators, self._states, strict=True)
        return next((g.name for g, state in pairs if _bits(g.get()) != _bits(state)), "")

    def put_back(self) -> None:
        for generator, state in zip(self._generators, self._states, strict=True):
            if _bits(generator.get()) != _bits(state):
                generator.set(state)


@contextmanager
def undrawn(model: nn.Module) -> Iterator[Generators]:
    """Leaves the generators as they were."""
    generators = Generators(model)
    try:
        yield generators
    finally:
        generators.put_back()


def _of(value: Any) -> _Generator:
    name = f"a {type(value).__name__} of its own"
    if isinstance(value, random.Random):
        return _Generator(name, value.getstate, value.setstate)
    if isinstance(value, (np.random.RandomState, torch.Generator)):
        return _Generator(name, value.get_state, value.set_state)
    bits = value.bit_generator if isinstance(value, np.random.Generator) else value
    return _Generator(name, lambda: bits.state, lambda state: setattr(bits, "state", state))


def _bits(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)
