"""No time for a wrong answer: what a contender must return before it is timed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

ROUNDING = 16  # units of roundoff: eager's own error may happen to be 0 in an output of one element
ROUNDING_UNKNOWN = 128  # where the model does not run in fp64, so that eager's own error is not known
DRAWS = 8  # about one batch in six of MLPerf's DLRM-v2 has a ReLU whose input is 0 within rounding
MOVED = 16 * torch.finfo(torch.float32).eps  # share of a weight: the sums of several layers in another order
KINK = 2e-5  # share of the largest element: moved weights change it by 6e-6, a ReLU's other side by 2e-5 to 5e-2


class WrongAnswer(Exception):
    """A contender's output is not eager's. The message says where and by how much."""


class Judge:
    """Compares with `model` on one input: same structure, shapes and dtypes; integers equal; the error of floats
    against `model` in fp64 at most twice eager's own plus rounding.

    Where the model cannot run in fp64, eager itself is the reference, with more units of rounding.
    """

    def __init__(self, model: nn.Module, fresh: Callable[[tuple], tuple] = lambda args: args) -> None:
        self.model, self.fresh = model, fresh
        self.double = copy.deepcopy(model).double()

    def expect(self, args: tuple) -> Expected:
        with torch.no_grad():
            eager, spec = tree_flatten(self.model(*self.fresh(args)))
            try:
                reference = tree_flatten(self.double(*self.fresh(tree_map(_widen, args))))[0]
            except (RuntimeError, TypeError):  # a model that makes fp32 tensors of its own
                return Expected(eager, eager, spec, ROUNDING_UNKNOWN)
        return Expected(eager, reference, spec)

    def expect_smooth(self, draw: Callable[[int], tuple]) -> tuple[tuple, Expected]:
        """The first of `draw(0)`, `draw(1)`, ... whose answer hardly moves when the weights move by a few roundings,
        and what is expected of it; the last one drawn where there is none. The model has to run in fp64.

        Elsewhere the input of some activation is its kink within rounding, and the gradients of both sides are right.
        """
        for seed in range(DRAWS):
            args = draw(seed)
            expected = self.expect(args)
            if all(self._hardly_moves(args, expected, most) for most in (MOVED, -MOVED)):
                break
        return args, expected

    def _hardly_moves(self, args: tuple, expected: Expected, most: float) -> bool:
        with torch.no_grad(), self._moved(most):
            moved = tree_flatten(self.double(*self.fresh(tree_map(_widen, args))))[0]
        pairs = [(m, r) for m, r in zip(moved, expected.reference, strict=True) if r.numel()]
        return all(float((m - r).abs().max()) <= KINK * float(r.abs().max()) for m, r in pairs)

    @contextmanager
    def _moved(self, most: float) -> Iterator[None]:
        """Every weight of the model in fp64 is off by a share of itself, by up to `most`."""
        generator = torch.Generator().manual_seed(0)
        factors = [
            (p, 1 + most * (2 * torch.rand(p.shape[-1:], generator=generator, dtype=p.dtype) - 1))
            for p in self.double.parameters()
        ]
        for p, factor in factors:
            p.mul_(factor)
        try:
            yield
        finally:
            for p, factor in factors:
                p.div_(factor)


class Expected:
    """What eager and the reference return for one input, flat, and the budget's units of rounding."""

    def __init__(self, eager: list[Any], reference: list[Any], spec: Any, rounding: int = ROUNDING) -> None:
        self.eager, self.reference, self.spec, self.rounding = eager, reference, spec, rounding

    def check(self, name: str, output: Any) -> float:
        """The largest absolute error of `output`; WrongAnswer if it is beyond the budget."""
        got, spec = tree_flatten(output)
        if spec != self.spec:
            raise WrongAnswer(f"{name}: expected an output of structure {self.spec}, found {spec}")
        outputs = enumerate(zip(got, self.eager, self.reference, strict=True))
        errors = [_error(f"{name}, output {i}", *output, self.rounding) for i, output in outputs]
        return max(errors, default=0.0)


def _error(where: str, got: Any, eager: Any, reference: Any, rounding: int) -> float:
    if not isinstance(eager, Tensor):
        if got != eager:
            raise WrongAnswer(f"{where}: expected {eager!r}, found {got!r}")
        return 0.0
    if (got.shape, got.dtype) != (eager.shape, eager.dtype):
        raise WrongAnswer(f"{where}: expected {eager.dtype} {[*eager.shape]}, found {got.dtype} {[*got.shape]}")
    if not eager.is_floating_point():
        if not torch.equal(got, eager):
            raise WrongAnswer(f"{where}: integers differ from eager's")
        return 0.0
    roundoff = rounding * torch.finfo(eager.dtype).eps
    got, eager, reference = (x.detach().double() for x in (got, eager, reference))
    return _float_error(where, got, eager, reference, roundoff)


def _float_error(where: str, got: Tensor, eager: Tensor, reference: Tensor, roundoff: float) -> float:
    finite = eager.isfinite()
    same = torch.equal(finite, got.isfinite())
    if not (same and (finite.all() or torch.allclose(got[~finite], eager[~finite], equal_nan=True))):
        raise WrongAnswer(f"{where}: NaN or infinity where eager has none, or the other way round")
    finite &= reference.isfinite()
    if not finite.all():  # a mask takes longer than all the rest
        got, eager, reference = got[finite], eager[finite], reference[finite]
    if got.numel() == 0:
        return 0.0
    error, own = (float((x - reference).abs().max()) for x in (got, eager))
    budget = 2 * own + roundoff * float(reference.abs().max())
    if error > budget:
        raise WrongAnswer(f"{where}: error {error:.2e}, budget {budget:.2e} (eager's own error is {own:.2e})")
    return error


def _widen(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
