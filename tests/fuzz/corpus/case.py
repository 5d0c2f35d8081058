"""A graph of the corpus: a model, its inputs, and the sizes at which it was wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fxopt.torch_internals.seeds import seed_started
from tests.fuzz.check import Failure, check
from tests.fuzz.programs import Loaded, Program, Sizes

Inputs = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """model: its class. inputs: from batch, length and the share of masks that is true."""

    model: type[nn.Module]
    inputs: Inputs
    program: Program

    def build(self) -> nn.Module:
        seed_started(0)
        return self.model().to(self.program.dtype).train(self.program.training)

    def failure(self) -> Failure | None:
        return check(self.program, loaded=Loaded(self.build, self.inputs))


def graph(
    inputs: Inputs,
    captured: tuple = (4, 4),
    later: tuple[tuple, ...] = ((3, 5), (1, 2)),
    **options: Any,
) -> Callable[[type[nn.Module]], Case]:
    """A decorator that makes a case of a model. options: those of Program."""
    sizes = {"captured": Sizes(*captured), "later": tuple(Sizes(*own) for own in later)}
    return lambda model: Case(model, inputs, Program(**sizes, **options))
