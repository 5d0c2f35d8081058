"""Two outcomes of one call, and whether rounding explains what differs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.outcome import Outcome, equal, outcome_of, short
from tests.fuzz.placed import CPU, elsewhere, moved
from tests.fuzz.programs import Program, Sizes
from tests.fuzz.rounding import Digits, Rounding, Widening, overlap

_EDITED = re.compile("modified by an inplace operation|has been modified inplace")
_NOISY_RUNS = 24  # at most: as many as it takes to excuse a difference


class Comparison:
    """One call of both, and (only where they differ) fp64 runs that say what rounding may do."""

    def __init__(
        self,
        program: Program,
        before: nn.Module,
        inputs: Callable,
        sizes: Sizes,
        seed: int,
        eager: Outcome,
        ours: Outcome,
    ) -> None:
        self.program, self.before, self.inputs, self.sizes, self.seed = program, before, inputs, sizes, seed
        self.eager, self.ours = eager, ours
        self._wide_noisy: list[Outcome] = []

    def difference(self) -> tuple[str, str] | None:
        eager, ours = self.eager, self.ours
        if "cannot reshape tensor of 0 elements" in str(eager.error):
            return None  # .view(0, -1), where a graph may know the size
        if _EDITED.search(str(eager.error)) and (ours.error is None or _EDITED.search(str(ours.error))):
            return None  # autograd's own limit, which a functional graph meets later, or never
        if eager.error is not None and ours.error is None:
            return "no error", f"eager raises {type(eager.error).__name__}: {short(eager.error)}"
        if eager.error is None and ours.error is not None:
            return "raises", f"{type(ours.error).__name__}: {short(ours.error)}"
        if not isinstance(ours.error, type(eager.error)):
            return "other error", f"eager {eager.error!r}, optimized {ours.error!r}"
        if eager.values.keys() != ours.values.keys():
            return "structure", f"{sorted(eager.values.keys() ^ ours.values.keys())} in one of them"
        for name, expected in eager.values.items():
            if self._copies and name.startswith("gradient of output"):
                continue
            message = self._different(name, expected, ours.values[name])
            if message:
                kind = "gradient" if name.startswith("gradient") else "output" if "output" in name else "effect"
                return f"{kind} {message[0]}", f"{name}: {message[1]}"
        return self._form() if eager.error is None else None

    def _different(self, name: str, expected: Any, found: Any) -> tuple[str, str] | None:
        if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
            same = type(expected) is type(found) and expected == found
            return None if same else ("value", f"expected {short(expected)}, found {short(found)}")
        for what in ("shape", "dtype", "requires_grad"):
            a, b = getattr(expected, what), getattr(found, what)
            if a != b:
                return what, f"expected {a}, found {b}"
        if equal(expected, found):
            return None
        exact = name in self._moved
        if exact or not expected.is_floating_point():
            if not exact and self._uncertain(name, expected):
                return None
            return "value", f"not equal: {_worst(expected.detach(), found.detach())}"
        message = self._beyond(name, expected.detach(), found.detach())
        return ("value", message) if message else None

    def _beyond(self, name: str, eager: Tensor, ours: Tensor) -> str:
        """What exceeds twice eager's own error, plus what rounding each step would do."""
        finite = eager.isfinite()
        if not equal(torch.where(finite, 0.0, eager), torch.where(ours.isfinite(), 0.0, ours)):
            if any(not torch.equal(r.isfinite(), finite) for r in self._noisy(name, eager)):
                return ""
            return f"NaN or infinity: {_worst(eager, ours)}"
        a, b = (torch.where(finite, t.double(), 0.0) for t in (eager, ours))
        eps = torch.finfo(eager.dtype).eps
        scale = float(a.abs().amax())
        if float((a - b).abs().amax()) <= 8 * eps * max(scale, 1e-30):
            return ""
        exact = self._reference(name, eager)
        floor = 16 * eps * scale
        if name.startswith("gradient"):  # of a bias in front of a norm, say: terms that cancel to zero
            floor = max(floor, 64 * eps * self._largest)
        allowed = torch.full((), floor, dtype=torch.float64, device=eager.device)
        if exact is None:
            return "" if float((a - b).abs().amax()) <= 1e3 * eps * max(scale, 1.0) else _worst(eager, ours)
        exact = torch.where(finite, exact, 0.0)
        error = (a - exact).abs()
        allowed = allowed + 2 * error.amax()
        if bool(((b - exact).abs() <= allowed).all()):
            return ""
        for noisy in () if self._exactly else self._noisy(name, eager):  # nothing rounded: nothing to excuse
            moved = torch.where(finite, (noisy - exact).abs(), 0.0).nan_to_num(posinf=1e30)
            allowed = torch.maximum(allowed, floor + 2 * error.amax() + 6 * moved.amax())
            if bool(((b - exact).abs() <= allowed).all()):
                return ""
        return f"{_worst(eager, ours)}; budget {float(allowed.amax()):.3g}"

    @cached_property
    def _exactly(self) -> bool:
        """Whether eager has rounded nothing: sums of halves, and what keeps them so."""
        if not self.program.whole:
            return False
        with Digits(self.program.dtype) as digits:
            wide = self._run(None).values
        values = self.eager.values.items()
        floats = {name: t.detach() for name, t in values if isinstance(t, Tensor) and t.is_floating_point()}
        return digits.suffice and all(
            name in wide and equal(t.double(), wide[name].detach().to(t.device)) for name, t in floats.items()
        )

    @cached_property
    def _largest(self) -> float:
        """Of all outputs and gradients: of that size may the terms of a gradient be that cancel."""
        values = (value for name, value in self.eager.values.items() if name.startswith(("gradient", "output")))
        found = (t.detach() for t in values if isinstance(t, Tensor) and t.is_floating_point() and t.numel())
        return max((float(t.abs().nan_to_num(0.0, 0.0).amax()) for t in found), default=0.0)

    def _uncertain(self, name: str, eager: Tensor) -> bool:
        """Whether integers change with the rounding of what they are made from."""
        return not self._exactly and any(not torch.equal(r, eager.double()) for r in self._noisy(name, eager))

    def _reference(self, name: str, like: Tensor) -> Tensor | None:
        return _of(self._wide, name, like)

    def _noisy(self, name: str, like: Tensor) -> Iterator[Tensor]:
        for run in range(_NOISY_RUNS):
            if run == len(self._wide_noisy):
                self._wide_noisy.append(self._run(run))
            value = _of(self._wide_noisy[run], name, like)
            if value is not None:
                yield value

    @cached_property
    def _copies(self) -> bool:
        """Whether a result is a contiguous() that may be a copy in eager alone, as what is computed from a transposed
        input may lie otherwise, a known limit: no gradient of other results arrives there."""
        transposed = any(isinstance(t, Tensor) and not t.is_contiguous() for t in self.eager.inputs)
        made = (line.split(" = ")[0] in self.program.outputs and ".contiguous()" in line for line in self.program.lines)
        return transposed and any(made)

    @cached_property
    def _moved(self) -> set[str]:
        """Outputs that hold no arithmetic."""
        return {f"output {i}" for i, name in enumerate(self.program.outputs) if name in self.program.exact}

    @cached_property
    def _wide(self) -> Outcome:
        return self._run(None)

    def _run(self, noise: int | None) -> Outcome:
        """On the CPU, where noise that makes an id too large does no harm.

        Every other run with noise is of the program's own dtype, whose operators may round worse than once.
        """
        own, wide = self.program.dtype, noise is None or noise % 2 == 0
        rounding = Rounding(noise or 0, torch.finfo(own).eps, torch.float64 if wide else own)
        with CPU if elsewhere() else nullcontext():
            model = moved(self.before, CPU).double() if wide else moved(self.before, CPU)
            with Widening() if wide else nullcontext(), nullcontext() if noise is None else rounding:
                return outcome_of(model, self.inputs, self.sizes, self.seed, self.program, wide=wide)

    def _form(self) -> tuple[str, str] | None:
        """Strides that a caller's .view(-1) sees, and memory that outputs share with each other and with inputs.

        A row or column of what lies transposed may have another stride: a known limit, and no view of it fails."""
        a, b = self.eager, self.ours
        for i, (own, found) in enumerate(zip(a.outputs, b.outputs, strict=True)):
            whole = isinstance(own, Tensor) and (own.dim() > 1 or own.nbytes == own.untyped_storage().nbytes())
            if whole and own.is_contiguous() and not found.is_contiguous():
                return "strides", f"output {i}: expected {own.stride()}, found {found.stride()} for {tuple(own.shape)}"
        pairs = [(i, j) for i in range(len(a.outputs)) for j in range(i)]
        for i, j in pairs:
            same = [overlap(o.outputs[i], o.outputs[j]) for o in (a, b)]
            if same[0] != same[1]:
                return "aliases", f"outputs {j} and {i} share memory: eager {same[0]}, optimized {same[1]}"
        for i, out in enumerate(a.outputs):
            for j in range(len(a.inputs)):
                same = [overlap(out, a.inputs[j]), overlap(b.outputs[i], b.inputs[j])]
                if same[0] != same[1]:
                    return "aliases", f"output {i} and input {j} share memory: eager {same[0]}, optimized {same[1]}"
        return None


def _of(outcome: Outcome, name: str, like: Tensor) -> Tensor | None:
    value = outcome.values.get(name)
    if outcome.error is not None or not isinstance(value, Tensor) or value.shape != like.shape:
        return None
    return value.detach().double().to(like.device)


def _worst(a: Tensor, b: Tensor) -> str:
    bad = (a.double() - b.double()).abs().nan_to_num(nan=float("inf"))
    at = int(bad.flatten().argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(at, device="cpu"), bad.shape)] if bad.dim() else []
    count = int((bad > 0).sum())
    values = [t.flatten()[at].item() for t in (a, b)]
    return f"{count} of {a.numel()}, worst at {index}: eager {values[0]:.9g}, optimized {values[1]:.9g}"
