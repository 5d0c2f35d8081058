"""Eager against optimized, call by call: values, gradients, state, effects, errors."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from fxopt.config import Config
from fxopt.kernels.by_rows.many import looking
from fxopt.optimize import optimize
from tests.fuzz.placed import CPU, elsewhere, is_spoilt, moved, on_cpu, on_default, settled
from tests.fuzz.programs import Loaded, Program, Sizes
from tests.fuzz.rounding import Rounding, Widening, overlap

_NOISY_RUNS = 24  # at most: as many as it takes to excuse a difference


@dataclass(frozen=True)
class Failure:
    """One difference. kind: what shrinking keeps. sizes: of the call, None for the capture."""

    kind: str
    message: str
    sizes: Sizes | None = None

    def __str__(self) -> str:
        where = f"at {tuple(self.sizes)}" if self.sizes else "at the capture"
        return f"{self.kind} {where}: {self.message}"


@dataclass
class Outcome:
    """What a call gave and left: tensors by name, and the exception."""

    values: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[Any, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    error: Exception | None = None


def check(program: Program, seen: Counter[str] | None = None, loaded: Loaded | None = None) -> Failure | None:
    """The first difference between eager and optimized, or None. `seen` counts what was run and what was rewritten."""
    with looking(pretended=program.many):
        return _checked(program, Counter() if seen is None else seen, loaded)


def _checked(program: Program, seen: Counter[str], loaded: Loaded | None) -> Failure | None:
    build, made = loaded or program.loaded()
    inputs, eager = on_default(made), on_cpu(build)()
    calls, rejected = list(enumerate((program.captured, *program.later))), False
    config = Config(verify=program.verify, tune="off")
    with torch.set_grad_enabled(program.grad):
        if elsewhere():
            harmless = _harmless(eager, made, calls, program)
            seen["left out"] += len(calls) - len(harmless)
            if not harmless:
                return None
            calls, eager = harmless, moved(eager, torch.get_default_device())
        failure, fast = _captured(program, copy.deepcopy(eager), eager, inputs, config)
        if failure is not None or fast is None:
            return failure
        for number, sizes in calls:
            wide = copy.deepcopy(eager)
            expected = _outcome(eager, inputs, sizes, number, program)
            if isinstance(expected.error, torch.AcceleratorError):
                raise expected.error  # the device is lost, by nothing of ours
            found = _outcome(fast, inputs, sizes, number, program)
            seen["calls"] += 1
            seen["raised"] += expected.error is not None
            rejected |= number == 0 and expected.error is not None
            comparison = _Comparison(program, wide, made, sizes, number, expected, found)
            difference = comparison.difference()
            if difference is not None:
                return Failure(*difference, sizes)
            _round_alike(fast, eager)
    _count(fast, seen)
    return None if rejected else _hidden(fast, program, loaded)


def _harmless(
    eager: nn.Module, made: Callable, calls: list[tuple[int, Sizes]], program: Program
) -> list[tuple[int, Sizes]]:
    """The calls up to the first that raises on the CPU; the other device may be lost by it."""
    with CPU:
        twin = copy.deepcopy(eager)
        return list(takewhile(lambda call: _outcome(twin, made, call[1], call[0], program).error is None, calls))


def _captured(
    program: Program, model: nn.Module, eager: nn.Module, inputs: Callable, config: Config
) -> tuple[Failure | None, nn.Module | None]:
    """The optimized model. Capturing changes nothing, and raises only what eager raises."""
    if not program.example:
        return None, optimize(model, config=config)
    torch.manual_seed(0)
    example = _made_of(inputs(*program.captured), program.grad)
    before, state = [t.detach().clone() for t in example], torch.get_rng_state()
    try:
        fast = optimize(model, example, config)
    except torch.AcceleratorError as error:
        return Failure("raises", f"optimize: {error!r}"), None
    except Exception as error:
        return _capture_error(error, eager, inputs, program)
    if is_spoilt():
        return Failure("raises", "optimize leaves the device in an error"), None
    for i, (old, new) in enumerate(zip(before, example, strict=True)):
        if not _equal(old, new.detach()):
            return Failure("capture edits", f"input {i} after optimize"), None
    if not torch.equal(state, torch.get_rng_state()):
        return Failure("capture edits", "random numbers were drawn"), None
    now = dict(_state(model))
    for name, value in _state(eager):
        if name not in now or not _equal(value, now[name]):
            return Failure("capture edits", f"{name} after optimize"), None
    if now.keys() != dict(_state(eager)).keys():
        return Failure("capture edits", f"{sorted(now.keys() - dict(_state(eager)).keys())} are new"), None
    return None, fast


def _capture_error(
    error: Exception, eager: nn.Module, inputs: Callable, program: Program
) -> tuple[Failure | None, nn.Module | None]:
    torch.manual_seed(0)
    try:
        copy.deepcopy(eager)(*_made_of(inputs(*program.captured), program.grad))
    except Exception as own:
        same = isinstance(error, type(own))
        return (None if same else Failure("other error", f"eager {own!r}, optimize {error!r}")), None
    return Failure("raises", f"optimize: {type(error).__name__}: {error}"), None


def _outcome(
    model: nn.Module, inputs: Callable, sizes: Sizes, seed: int, program: Program, wide: bool = False
) -> Outcome:
    """One call on inputs of these sizes, what the caller does with a result, and the gradients of a fixed loss."""
    torch.manual_seed(seed)
    given = inputs(*sizes)
    if wide:
        given = tuple(_widened(t) for t in given)
    leaves = tuple(given)
    given = _made_of(given, program.grad)
    for parameter in model.parameters():
        parameter.grad = None
    outcome = Outcome(inputs=given)
    try:
        result = model(*given)
        outcome.outputs = result if isinstance(result, tuple) else (result,)
        outcome.values = {f"output {i}": _frozen(leaf) for i, leaf in enumerate(outcome.outputs)}
        if program.grad:
            outcome.values.update(_between(outcome.outputs))
        if program.edited in program.outputs:
            edited = outcome.outputs[program.outputs.index(program.edited)]
            outcome.values.update(_edited(outcome.outputs, edited, given if program.grad else ()))
        if program.grad:
            outcome.values.update(_gradients(model, leaves, outcome.outputs))
        settled()
    except torch.AcceleratorError as error:
        return Outcome(error=error)
    except Exception as error:
        outcome.error = error
    outcome.values.update((name, _frozen(value)) for name, value in _state(model))
    outcome.values.update((f"input {i} after the call", _frozen(t)) for i, t in enumerate(given))
    return outcome


def _widened(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor


def _made_of(given: tuple[Tensor, ...], grad: bool) -> tuple[Tensor, ...]:
    """An edit in place of a leaf, or of a view of one, raises, so that forward gets what was computed from it."""
    return tuple(t.clone() if grad and t.requires_grad else t for t in given)


def _edited(outputs: tuple[Any, ...], result: Any, kept: Sequence[Tensor]) -> dict[str, Any]:
    """All outputs after the caller's edit of one: which of them share memory, and whether backward needs it.

    kept: what a graph may keep for backward where eager does not, a known limit.
    """
    floats = isinstance(result, Tensor) and result.is_floating_point()
    if floats and not any(overlap(result, tensor) for tensor in kept):
        result.detach().mul_(0.5)
    return {f"output {i} after an edit": _frozen(value) for i, value in enumerate(outputs)}


def _roots(outputs: tuple[Any, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that have gradients, and what comes in at each."""
    generator = torch.Generator("cpu").manual_seed(7)
    roots = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
    return roots, [torch.randint(-4, 5, t.shape, generator=generator, device="cpu").to(t) for t in roots]


def _between(outputs: tuple[Any, ...]) -> dict[str, Any]:
    """The gradient of all outputs in each, as hooks on it see it. Ahead of edits: one of a view takes its ways away."""
    roots, seeds = _roots(outputs)
    if len(roots) < 2:
        return {}
    found = torch.autograd.grad(roots, roots, seeds, retain_graph=True)
    return {f"gradient of output {i}": grad for i, grad in enumerate(found)}


def _gradients(model: nn.Module, leaves: tuple[Tensor, ...], outputs: tuple[Any, ...]) -> dict[str, Any]:
    roots, seeds = _roots(outputs)
    if roots:
        torch.autograd.backward(roots, seeds)
    named = [*model.named_parameters(), *((f"input {i}", t) for i, t in enumerate(leaves) if t.requires_grad)]
    return {f"gradient of {name}": t.grad for name, t in named}


def _state(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Parameters, buffers, and plain attributes that hold tensors or numbers."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, (Tensor, int, float)) and name != "training":
                yield f"{path}.{name}", value


def _round_alike(fast: nn.Module, eager: nn.Module) -> None:
    """Each call starts from one state: what a statistic of two rows has been rounded by stays in it."""
    found = {**dict(fast.named_parameters()), **dict(fast.named_buffers())}
    for name, value in (*eager.named_parameters(), *eager.named_buffers()):
        if not _equal(value, found[name]):
            found[name].data.copy_(value.data)


def _frozen(value: Any) -> Any:
    """A copy that later edits do not reach, with what its form was."""
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().clone(memory_format=torch.preserve_format)
    return copied.requires_grad_() if value.requires_grad and value.is_floating_point() else copied


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.detach(), b.detach()
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


class _Comparison:
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
        limit = "modified by an inplace operation"
        if limit in str(eager.error) and (ours.error is None or limit in str(ours.error)):
            return None  # autograd's own limit, which a functional graph meets later, or never
        if eager.error is not None and ours.error is None:
            return "no error", f"eager raises {type(eager.error).__name__}: {_short(eager.error)}"
        if eager.error is None and ours.error is not None:
            return "raises", f"{type(ours.error).__name__}: {_short(ours.error)}"
        if not isinstance(ours.error, type(eager.error)):
            return "other error", f"eager {eager.error!r}, optimized {ours.error!r}"
        if eager.values.keys() != ours.values.keys():
            return "structure", f"{sorted(eager.values.keys() ^ ours.values.keys())} in one of them"
        for name, expected in eager.values.items():
            message = self._different(name, expected, ours.values[name])
            if message:
                kind = "gradient" if name.startswith("gradient") else "output" if "output" in name else "effect"
                return f"{kind} {message[0]}", f"{name}: {message[1]}"
        return self._form() if eager.error is None else None

    def _different(self, name: str, expected: Any, found: Any) -> tuple[str, str] | None:
        if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
            same = type(expected) is type(found) and expected == found
            return None if same else ("value", f"expected {_short(expected)}, found {_short(found)}")
        for what in ("shape", "dtype", "requires_grad"):
            a, b = getattr(expected, what), getattr(found, what)
            if a != b:
                return what, f"expected {a}, found {b}"
        if _equal(expected, found):
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
        if not _equal(torch.where(finite, 0.0, eager), torch.where(ours.isfinite(), 0.0, ours)):
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
        wide, eager = self._wide.values, self.eager.values
        floats = [name for name, t in eager.items() if isinstance(t, Tensor) and t.is_floating_point()]
        return self.program.whole and all(
            name in wide and _equal(eager[name].detach().double(), wide[name].detach().to(eager[name].device))
            for name in floats
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
                return _outcome(model, self.inputs, self.sizes, self.seed, self.program, wide=wide)

    def _form(self) -> tuple[str, str] | None:
        """Strides that a caller's .view(-1) sees, and memory that outputs share with each other and with inputs."""
        a, b = self.eager, self.ours
        for i, (own, found) in enumerate(zip(a.outputs, b.outputs, strict=True)):
            if isinstance(own, Tensor) and own.is_contiguous() and not found.is_contiguous():
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


def _short(value: object) -> str:
    return str(value).split("\n")[0][:200]


def _count(fast: nn.Module, seen: Counter[str]) -> None:
    """Which passes found something, and how many captures there are."""
    seen["graphs"] += 1
    for entry in fast._fxopt.entries:  # type: ignore[union-attr]
        seen["captures"] += entry.executable is not None
        seen["eager"] += entry.executable is None
        for ran in entry.findings.passes:
            if ran.changes:
                seen[f"pass {ran.name}"] += 1


_DROPPED = ("the captured graph", "the optimized graph raised", "the capture failed in")


def _hidden(fast: nn.Module, program: Program, loaded: Loaded | None) -> Failure | None:
    """A graph that was dropped after it raised, or what verification has hidden: it turns down rounding as well, such
    as that behind a norm of few rows, so that what counts is what the rewrite gives without it."""
    for entry in fast._fxopt.entries:  # type: ignore[union-attr]
        reason = entry.findings.eager_reason or ""
        if any(text in reason for text in _DROPPED):
            return Failure("dropped", _short(reason))
        for ran in entry.findings.passes:
            if ran.rolled_back and program.verify != "off":
                return _checked(replace(program, verify="off"), Counter(), loaded)
    return None
