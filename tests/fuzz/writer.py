"""Writes a program line by line, and runs each line on a sample to know its dtype and shape."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz.programs import Input, Program, Sizes

# Sizes of the sample: primes that no number in a model is, so that a dim of so many tells what it is.
B, L = 23, 19
SAMPLE = Sizes(B, L, 0.6)
STATIC = (1, 2, 3, 4, 4, 4, 5, 8)
_LARGEST = 60_000
_UNSEEN = re.compile(r"= \w+\.data$", re.M)  # an edit of it changes what eager keeps for backward
T = TypeVar("T")


@dataclass(frozen=True)
class Value:
    """A variable of the program and what it holds for the sample. exact: only moved since the inputs."""

    name: str
    sample: Tensor
    exact: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def shape(self) -> torch.Size:
        return self.sample.shape

    @property
    def rank(self) -> int:
        return self.sample.dim()

    @property
    def floats(self) -> bool:
        return self.sample.is_floating_point()


class Writer:
    """A program in the making.

    Attributes:
        width: the number that most static sizes are, and the captured batch and length often too.
        values: the variables so far, oldest first.
    """

    def __init__(self, random: random.Random, dtype: torch.dtype, width: int, sample: Sizes = SAMPLE) -> None:
        self.random = random
        self.dtype = dtype
        self.sample = sample
        self.width = width
        self.setup: list[str] = []
        self.inputs: list[Input] = []
        self.lines: list[str] = []
        self.values: list[Value] = []
        self.used: set[str] = set()
        self.module = nn.Module()
        self.scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "self": self.module, "dtype": dtype}
        self.scope |= sample._asdict()
        self._count = 0

    def pick(self, options: Sequence[T]) -> T:
        return self.random.choice(options)

    def chance(self, percent: int) -> bool:
        return self.random.randrange(100) < percent

    def size(self) -> int:
        """A static size: mostly the one of this program."""
        return self.width if self.chance(60) else self.pick(STATIC)

    def fresh(self, stem: str) -> str:
        self._count += 1
        return f"{stem}{self._count}"

    # Variables

    def any(self, test: Callable[[Value], bool] = lambda value: True) -> Value | None:
        """A variable, rather a young one."""
        fitting = [value for value in self.values if test(value)]
        if not fitting:
            return None
        return fitting[-1 - min(int(self.random.expovariate(0.6)), len(fitting) - 1)]

    def float(self, rank: int | None = None) -> Value:
        """A float variable; a new input where there is none of this rank."""
        found = self.any(lambda v: v.floats and (rank is None or v.rank == rank) and v.sample.dtype is self.dtype)
        return found or self.given(("B", *(self.size() for _ in range((rank or 2) - 1))))

    def rows(self) -> Value:
        """[B, n]."""
        found = self.any(lambda v: v.floats and v.rank == 2 and v.shape[0] == self.sample.B)
        return found if found and not self.chance(5) else self.given(("B", self.size()))

    def cube(self, fields: bool = False) -> Value:
        """[B, F, D], or [B, L, D] where it need not be fields."""
        known = [self.sample.L] if fields else []
        found = self.any(lambda v: v.floats and v.rank == 3 and v.shape[0] == self.sample.B and v.shape[1] not in known)
        if found and not self.chance(10):
            return found
        if self.chance(40):
            return self.embedded(fields)
        return self.given(("B", self.size() if fields or self.chance(50) else "L", self.size()))

    def embedded(self, fields: bool = False) -> Value:
        """Lookups in one table: [B, F, D] or [B, L, D]."""
        rows, dim = self.pick((6, 10, 20)), self.size()
        padding = self.pick(("", "", "", ", padding_idx=0"))
        ids = self.ids(("B", self.size() if fields or self.chance(50) else "L"), rows)
        found = self.line(f"{self.state('e', f'nn.Embedding({rows}, {dim}{padding})')}({ids})")
        assert found is not None
        return found

    # Inputs and state

    def given(self, dims: tuple[str | int, ...]) -> Value:
        """A new float input."""
        shape = ", ".join(map(str, dims))
        made = self.pick(
            (
                f"torch.randn({shape})",
                f"torch.randn({shape})",
                f"torch.randn({shape})",
                f"torch.randn({shape}).mul(2).round().div(2)",  # ties, zeros and bounds
                f"(torch.rand({shape}) + 0.5)",
            )
        )
        if self.chance(12):  # rows of zeros, as padding is
            made += f".mul(torch.rand({', '.join(map(str, dims[:-1]))}, 1) < 0.7)"
        made += f".to({self.dtype})" if self.dtype is not torch.float32 else ""
        if len(dims) > 1 and self.chance(15):
            made = self.pick(
                (
                    "{x}.transpose(0, -1).contiguous().transpose(0, -1)",
                    "torch.stack([{x}, {x}], -1)[..., 0]",
                    "torch.cat([{x}, {x}], -1)[..., 1:{n} + 1]",
                )
            ).format(x=made, n=dims[-1])
        return self.argument("x", made, grad=self.chance(40), exact=True)

    def ids(self, dims: tuple[str | int, ...], rows: int) -> Value:
        return self.argument("ids", f"torch.randint(0, {rows}, ({', '.join(map(str, dims))},))", exact=True)

    def mask(self, dims: tuple[str | int, ...]) -> Value:
        """bool; all true where fill is 1."""
        return self.argument("mask", f"torch.rand({', '.join(map(str, dims))}) < fill", exact=True)

    def lengths(self) -> Value:
        """int64 [B] up to L; L where fill is 1."""
        return self.argument("lengths", "torch.randint(L if fill == 1 else 0, L + 1, (B,))", exact=True)

    def argument(self, stem: str, made: str, grad: bool = False, exact: bool = False) -> Value:
        name = self.fresh(stem)
        self.inputs.append(Input(name, made, grad))
        self.scope[name] = eval(made, self.scope)
        return self._bound(name, exact)

    def state(self, stem: str, made: str) -> str:
        """An attribute of the module: a submodule, a parameter, or whatever else."""
        name = self.fresh(stem)
        value = eval(made, self.scope)
        if isinstance(value, nn.Module):
            value = value.to(self.dtype)
        elif isinstance(value, nn.Parameter):
            value = nn.Parameter(value.detach().to(self.dtype), value.requires_grad)
        self.setup.append(f"self.{name} = {made}")
        setattr(self.module, name, value)
        return f"self.{name}"

    def buffer(self, made: str) -> str:
        name = self.fresh("buffer")
        value = eval(made, self.scope)
        self.setup.append(f'self.register_buffer("{name}", {made})')
        self.module.register_buffer(name, value.to(self.dtype) if value.is_floating_point() else value)
        return f"self.{name}"

    def parameter(self, *dims: int) -> str:
        return self.state("w", f"nn.Parameter(torch.randn({', '.join(map(str, dims))}))")

    # Lines

    def line(self, expression: str, exact: bool = False) -> Value | None:
        """A new variable; None, and nothing written, where eager refuses it or it would be large."""
        return self._made(lambda name: f"{name} = {expression}", exact)

    def block(self, template: str, **given: Value) -> Value | None:
        """A new variable {v} that several statements make; None as of line()."""
        return self._made(lambda name: template.format(v=name, **given), exact=False)

    def _made(self, by: Callable[[str], str], exact: bool) -> Value | None:
        name = f"v{self._count + 1}"
        written = by(name)
        scope = dict(self.scope)
        try:
            with torch.no_grad():
                exec(written, scope)
        except Exception:
            return None
        result = scope[name]
        if not isinstance(result, Tensor) or result.numel() > _LARGEST or result.dim() > 5 or self._wild(result):
            return None
        self.lines.append(written)
        self.scope[self.fresh("v")] = result
        return self._bound(name, exact)

    def unpacked(self, expression: str, exact: bool = False) -> list[Value]:
        """Several new variables of one tuple; none where eager refuses it."""
        try:
            with torch.no_grad():
                results = tuple(eval(expression, self.scope))
        except Exception:
            return []
        if not 1 <= len(results) <= 8 or any(not isinstance(r, Tensor) or self._wild(r) for r in results):
            return []
        names = [self.fresh("v") for _ in results]
        self.lines.append(f"{', '.join(names)}{',' * (len(names) == 1)} = {expression}")
        self.scope.update(zip(names, results, strict=True))
        return [self._bound(name, exact) for name in names]

    def do(self, statement: str) -> bool:
        """A statement that binds nothing; False where eager refuses it."""
        try:
            with torch.no_grad():
                exec(statement, self.scope)
        except Exception:
            return False
        self.lines.append(statement)
        self.values = [replace(value, exact=False) for value in self.values]  # it may have edited any
        return True

    def finish(self, outputs: Sequence[Value], edited: int, grad: bool, **options: Any) -> Program:
        """edited: the number of the output that the caller edits, if there are as many, and autograd sees the edit."""
        exact = frozenset(value.name for value in outputs if value.exact)
        names = tuple(value.name for value in outputs)
        if not grad or not any(_UNSEEN.search(line) for line in self.lines):
            options["edited"] = names[edited] if edited < len(names) else ""
        written = tuple(self.setup), tuple(self.inputs), tuple(self.lines)
        return Program(*written, names, exact, self.dtype, grad, **options)

    @staticmethod
    def _wild(result: Tensor) -> bool:
        """Numbers that would soon be infinite, or nothing but rounding."""
        if not result.is_floating_point() or not result.numel():
            return False
        return not bool(result.detach().abs().amax() < 1e3)

    def _bound(self, name: str, exact: bool) -> Value:
        value = Value(name, self.scope[name], exact)
        self.values.append(value)
        return value
