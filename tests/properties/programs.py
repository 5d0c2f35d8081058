"""A random model is a few lines of Python: a failing example prints as the program that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.properties.inputs import Input, Sizes

B, L = 3, 4  # the sample on which a program is tried while it is written


@dataclass(frozen=True)
class Table:
    """A parameter [rows, dim]; `module` is the nn.Module around it ("" for a bare parameter)."""

    rows: int
    dim: int
    dtype: torch.dtype
    module: str = ""
    special: bool = False  # holds NaN and infinities

    def values(self, generator: torch.Generator) -> Tensor:
        """Small multiples of 1/4: their sums are exact in any order, and maxima have ties."""
        values = torch.randint(-8, 9, (self.rows, self.dim), generator=generator) / 4
        if self.special:
            row, column = self.rows // 2, self.dim // 2
            values[row, column], values[row - 1, 0], values[row - 2, 0] = torch.nan, torch.inf, -torch.inf
        return values.to(self.dtype)

    def build(self, generator: torch.Generator) -> nn.Module | nn.Parameter:
        values = self.values(generator)
        if not self.module:
            return nn.Parameter(values)
        module = eval(f"nn.{self.module}", {"nn": nn}).to(self.dtype)
        module.weight = nn.Parameter(values)
        return module


@dataclass
class Program:
    """forward's lines, with the inputs and the state that they name."""

    lines: list[str] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    tables: dict[str, Table] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    training: bool = False
    grad: bool = True
    sizes: Sizes = field(default_factory=lambda: Sizes(5, 3))

    def source(self) -> str:
        names = ", ".join(["self", *(given.name for given in self.inputs)])
        return "\n    ".join([f"def forward({names}):", *self.lines]) + "\n"

    def model(self) -> nn.Module:
        namespace: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(self.source(), "<random model>", "exec"), namespace)
        model = type("Random", (nn.Module,), {"forward": namespace["forward"]})()
        generator = torch.Generator().manual_seed(0)
        for name, table in self.tables.items():
            setattr(model, name, table.build(generator))
        for name, buffer in self.buffers.items():
            model.register_buffer(name, buffer)
        return model.train(self.training)

    def arguments(self, sizes: Sizes, seed: int) -> tuple[Tensor, ...]:
        return tuple(given.make(sizes, seed) for given in self.inputs)

    def __repr__(self) -> str:
        parts = [self.source(), *map(str, self.inputs), *(f"{n}: {t}" for n, t in self.tables.items())]
        parts += [f"{name}: {buffer.tolist()} {buffer.dtype}" for name, buffer in self.buffers.items()]
        return "\n" + "\n".join([*parts, f"training={self.training} grad={self.grad} captured at {self.sizes}"])


@dataclass(frozen=True)
class Value:
    """A variable of the program and what it holds for the sample."""

    name: str
    sample: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.sample.dtype

    @property
    def floats(self) -> bool:
        return self.sample.is_floating_point()


class Writer:
    """Writes a program line by line, and runs each line on the sample to know its dtype and shape."""

    def __init__(self, pick: Callable[[Sequence[Any]], Any]) -> None:
        self.pick = pick
        self.program = Program()
        self._scope: dict[str, Any] = {"torch": torch, "F": F, "self": nn.Module()}
        self._count = 0

    def chance(self, percent: int) -> bool:
        return self.pick(range(100)) < percent

    def fresh(self, stem: str) -> str:
        self._count += 1
        return f"{stem}{self._count}"

    def input(self, **options: Any) -> Value:
        given = Input(self.fresh("x"), **options)
        self.program.inputs.append(given)
        return self._bound(given.name, torch.zeros([{"B": B, "L": L}.get(d, d) for d in given.dims], dtype=given.dtype))

    def bag(self, **options: Any) -> tuple[Value, ...]:
        """ids [N], offsets and weights [N] of one jagged feature."""
        family, found = self.fresh("bag"), []
        for role, dtype in (
            ("ids", options["dtype"]),
            ("offsets", options.pop("offsets")),
            ("weights", options.pop("floats")),
        ):
            given = Input(f"{family}_{role}", role=role, **{**options, "dtype": dtype})
            self.program.inputs.append(given)
            found.append(self._bound(given.name, given.make(Sizes(B, L), 0)))
        return tuple(found)

    def table(self, table: Table) -> str:
        name = self.fresh("emb" if table.module else "w")
        self.program.tables[name] = table
        setattr(self._scope["self"], name, table.build(torch.Generator().manual_seed(0)))
        return f"self.{name}"

    def buffer(self, values: Tensor) -> str:
        name = self.fresh("edges")
        self.program.buffers[name] = values
        setattr(self._scope["self"], name, values)
        return f"self.{name}"

    def line(self, expression: str, sample: Tensor | None = None) -> Value | None:
        """A new variable; None, and nothing written, where eager refuses the types."""
        if sample is None:
            try:
                with torch.no_grad():
                    sample = eval(expression, self._scope)
            except (RuntimeError, TypeError, ValueError, IndexError):
                return None
        name = self.fresh("v")
        self.program.lines.append(f"{name} = {expression}")
        return self._bound(name, sample)

    def finish(self, expression: str) -> Program:
        self.program.lines.append(f"return {expression}")
        return self.program

    def _bound(self, name: str, sample: Tensor) -> Value:
        self._scope[name] = sample
        return Value(name, sample)
