"""A random model is a module of Python source: what the harness runs is what a reader gets to see and to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Sizes(NamedTuple):
    """Batch size, padded length, and the share of a mask that is true: 1.0 picks and fills everything."""

    B: int
    L: int
    fill: float = 0.6


CAPTURED, LATER = Sizes(4, 4), (Sizes(3, 5), Sizes(1, 2))


@dataclass(frozen=True)
class Input:
    """One argument of forward. made: an expression over B, L and fill."""

    name: str
    made: str
    grad: bool = False

    @property
    def line(self) -> str:
        return f"{self.name} = {self.made}" + (".requires_grad_()" if self.grad else "")


class Loaded(NamedTuple):
    """The two functions of a program's source."""

    build: Callable[[], nn.Module]
    inputs: Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Program:
    """A model and how it is called.

    setup: lines of __init__. lines: statements of forward, each of one or more lines. outputs: names, the first `exact`
    of them only moved or integers. whole: weights are halves, so that sums have no rounding and ties are exact.
    example: captured by optimize(model, example), else at the first call. many: computed as a large batch is.
    edited: the output that the caller edits as soon as it has it. nan: so is one number of what comes in at backward.
    """

    setup: tuple[str, ...] = ()
    inputs: tuple[Input, ...] = ()
    lines: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    exact: frozenset[str] = frozenset()
    dtype: torch.dtype = torch.float32
    grad: bool = False
    training: bool = False
    whole: bool = False
    verify: str = "off"
    example: bool = True
    many: bool = False
    edited: str = ""
    nan: bool = False
    captured: Sizes = CAPTURED
    later: tuple[Sizes, ...] = LATER

    def source(self) -> str:
        """Classes and functions: Model, build() and inputs(B, L, fill)."""
        names = ", ".join(["self", *(given.name for given in self.inputs)])
        forward = [line for statement in self.lines for line in statement.split("\n")]
        returned = ", ".join(self.outputs) + ("," if len(self.outputs) == 1 else "")
        halves = ".mul_(2).round_().div_(2)" if self.whole else ""
        given = [f"    {given.line}" for given in self.inputs]
        return "\n".join(
            [
                "import torch",
                "import torch.nn.functional as F",
                "from torch import nn",
                "",
                "",
                "class Model(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        {line}" for line in self.setup),
                "",
                f"    def forward({names}):",
                *(f"        {line}" for line in forward),
                f"        return {returned}",
                "",
                "",
                "def build():",
                "    torch.manual_seed(0)",
                f"    model = Model().to({self.dtype}).train({self.training})",
                "    with torch.no_grad():",
                "        for tensor in [*model.parameters(), *model.buffers()]:",
                "            if tensor.is_floating_point():",
                f"                tensor.add_(torch.rand_like(tensor) / 2){halves}",
                "    return model",
                "",
                "",
                "def inputs(B, L, fill=0.6):",
                f"    dtype = {self.dtype}",
                *given,
                f"    return ({' '.join(given.name + ',' for given in self.inputs)})",
                "",
            ]
        )

    def reproducer(self) -> str:
        """A script that prints what eager and fxopt give, call by call."""
        calls = ", ".join(str(tuple(sizes)) for sizes in (self.captured, *self.later))
        prepared = f"inputs{tuple(self.captured)}" if self.example else "None"
        edit = _EDIT.format(number=self.outputs.index(self.edited)) if self.edited in self.outputs else ""
        return self.source() + _SCRIPT.format(
            grad=self.grad, prepared=prepared, verify=self.verify, calls=calls, many=self.many, edit=edit
        )

    def loaded(self) -> Loaded:
        namespace: dict[str, Any] = {"__name__": "random model"}
        exec(compile(self.source(), "<random model>", "exec"), namespace)
        return Loaded(namespace["build"], namespace["inputs"])


_EDIT = """
                results[{number}].detach().mul_(0.5)
                if any(result.requires_grad for result in results):
                    sum(result.sum() for result in results if result.requires_grad).backward()"""
_SCRIPT = """

if __name__ == "__main__":
    import copy

    from fxopt.config import Config
    from fxopt.kernels.by_rows.many import looking
    from fxopt.optimize import optimize

    looking(pretended={many}).__enter__()
    torch.set_grad_enabled({grad})
    torch.set_printoptions(precision=9)
    eager = build()
    torch.manual_seed(0)
    fast = optimize(copy.deepcopy(eager), {prepared}, Config(verify="{verify}", tune="off"))
    for number, sizes in enumerate([{calls}]):
        for name, model in (("eager", eager), ("fxopt", fast)):
            torch.manual_seed(number)
            try:
                results = model(*inputs(*sizes)){edit}
                print(name, sizes, results)
            except Exception as error:
                print(name, sizes, type(error).__name__, error)
    print(fast._fxopt.findings)
"""
