"""verify: eager, the rewritten graph, and (only when they differ) an fp64 reference, on the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from fxopt.capture import Capture
from fxopt.capture.effects import stores_of
from fxopt.kernels.by_rows.many import looking
from fxopt.runtime.executable import Executable
from fxopt.shape.conditions import ASKED, OtherSizes
from fxopt.verify.budget import Reference, explains, largest_difference, rounding_of, within_budget, within_share
from fxopt.verify.poison import leave_nothing
from fxopt.verify.reference import double_run
from fxopt.verify.trial import Setting, Trial, gradients, undisturbed

_DOUBLE_SHARE = 2.0**-42  # a row's own product rounds in another order, and nothing is wider than float64 to judge it


@dataclass(frozen=True)
class Verdict:
    """Whether the optimized graph may stand for the eager model.

    Attributes:
        max_error: largest absolute difference from eager over all outputs (None: nothing was compared).
        message: what is wrong and where; "" when ok.
        capture_ok: False when already the unrewritten graph differs from eager: no rewrite is to blame.
    """

    ok: bool
    max_error: float | None = None
    message: str = ""
    capture_ok: bool = True


def bisect(compile_with_fuel: Callable[[int], Verdict], n: int) -> int:
    """Index of the first bad one of `n` rewrites, in about log2(n) compilations.

    Args:
        compile_with_fuel: the verdict with only the first k rewrites applied. Fuel 0 is taken to be ok, fuel n not.
    """
    good, bad = 0, n
    while bad - good > 1:
        middle = (good + bad) // 2
        if compile_with_fuel(middle).ok:
            good = middle
        else:
            bad = middle
    return bad - 1


class Comparison:
    """Eager on one setting, with which graphs are compared; the captured graph explains a difference.

    where: begins what is said of a difference. share: what may differ at a loss, None for nothing.
    """

    def __init__(self, where: str, captured: Capture, model: nn.Module, setting: Setting, share: float | None) -> None:
        self.where = where
        self.captured = captured
        self.model = model
        self.setting = setting
        self.share = share
        self.eager = setting.run_model(model)

    def verdict(self, executable: Executable) -> Verdict:
        """Of the graph as it is run, and once more as large batches run it, where that is another way."""
        verdict, many_differ = self._verdict(executable, self.where, pretended=False)
        if not (verdict.ok and many_differ):
            return verdict
        many, _ = self._verdict(executable, f"{self.where}computed as a large batch is: ", pretended=True)
        return replace(many, max_error=max(many.max_error or 0.0, verdict.max_error or 0.0))

    def _verdict(self, executable: Executable, where: str, pretended: bool) -> tuple[Verdict, bool]:
        if executable.graph is not None:
            leave_nothing(executable.graph.graph)
        with looking(pretended) as look:
            ours = self.setting.run_graph(executable.run, self.model)
        return self._judged(ours, where, pretended), look.asked

    def _judged(self, ours: Trial, where: str, pretended: bool) -> Verdict:
        error = _max_error(self.eager, ours)
        message = self._difference(ours, pretended)
        if not message:
            return Verdict(True, error)
        captured = self._difference(self._plain)
        if captured:
            message = f"{where}the captured graph, before any rewrite: {captured}"
            return Verdict(False, error, message, capture_ok=False)
        return Verdict(False, error, where + message)

    @property
    def served(self) -> bool:
        """Whether the capture is for these inputs; data and opaque modules may give sizes that it is not for."""
        asks = any(node.target in ASKED for node in self.captured.graph.graph.nodes) or self.captured.leaves
        return not (asks and isinstance(self._plain.error, OtherSizes))

    @cached_property
    def _plain(self) -> Trial:
        return self.setting.run_graph(self.captured.graph, self.model)

    def _difference(self, ours: Trial, pretended: bool = False) -> str:
        eager, out_spec = self.eager, self.captured.out_spec
        if eager.error is not None or ours.error is not None:
            return self._different_errors(eager.error, ours.error)
        if eager.structure != out_spec:
            return f"expected a result of structure {eager.structure}, found {out_spec}"
        if eager.values.keys() != ours.values.keys():
            odd = sorted(eager.values.keys() ^ ours.values.keys())
            return f"{', '.join(odd)}: only in {'eager' if odd[0] in eager.values else 'the optimized graph'}"
        for name, expected in eager.plain.items():
            if (found := ours.plain.get(name)) != expected:
                return f"{name}: expected {expected!r}, found {found!r}"
        for name, expected in eager.values.items():
            found = ours.values[name]
            strides = not name.startswith("gradient of")  # a leaf's .grad gets the leaf's strides, whatever comes in
            message = _different_form(expected, found, strides) or within_budget(
                expected.detach(), found.detach(), partial(self._reference, name)
            )
            share = _DOUBLE_SHARE if pretended and expected.dtype is torch.float64 else self.share
            if message and share is not None and not _different_form(expected, found, strides):
                message = within_share(expected.detach(), found.detach(), share)
            if message:
                return f"{name}: {message}"
        return ""

    @staticmethod
    def _different_errors(eager: Exception | None, ours: Exception | None) -> str:
        if eager is not None and isinstance(ours, type(eager)):
            return ""
        expected, found = (f"{type(e).__name__}: {e}" if e is not None else "a result" for e in (eager, ours))
        return f"expected {expected}, found {found}"

    def _reference(self, name: str) -> Reference | None:
        """The fp64 values, if there are any and they are those of what eager computes."""
        try:
            exact = self._exact[name].detach()
            reference = Reference(exact, lambda: self._moved(name, exact))
            eager, plain = self.eager.values[name].detach(), self._plain.values.get(name)
            same = plain is not None and plain.shape == eager.shape and not within_budget(eager, plain.detach(), _none)
            return (
                reference if same or explains(reference, eager, rounding_of(eager, self.captured.graph.graph)) else None
            )
        except Exception:  # an operator without a float64 kernel: no reference, the difference stands
            return None

    def _moved(self, name: str, exact: Tensor) -> Tensor:
        """The fp64 values of perturbed inputs; the exact ones where those are inputs that an operator refuses."""
        try:
            return self._perturbed[name].detach()
        except Exception:  # a label of 1 + eps, or a float64 that no kernel takes: nothing is excused
            return exact

    @cached_property
    def _exact(self) -> dict[str, Tensor]:
        return self._wide_values(perturb=False)

    @cached_property
    def _perturbed(self) -> dict[str, Tensor]:
        return self._wide_values(perturb=True)

    def _wide_values(self, perturb: bool) -> dict[str, Tensor]:
        """The values of the baseline graph in fp64, under the names that Trial uses."""
        with self.setting.tensors(self.model) as tensors:
            return self._widened(tensors, _Widen(perturb))

    def _widened(self, tensors: list[Tensor], widen: _Widen) -> dict[str, Tensor]:
        differentiate = self.setting.gradients
        leaves: list[Tensor | None] = [None] * len(tensors)
        if differentiate:  # gradients are taken with respect to whole leaves
            leaves = [widen(t).requires_grad_(t.requires_grad) if t.is_floating_point() else None for t in tensors]
        with undisturbed(self.model), torch.set_grad_enabled(differentiate):
            move = widen.moved if widen.noise is not None and differentiate else None
            flat, wide = double_run(self.captured.graph, tensors, widen, leaves, move)
        values = {f"output {i}": leaf for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)}
        outputs = list(values.values())
        for number in self.setting.written:
            now = wide[number]
            values[f"{self.setting.names[number]} after the call"] = tensors[number] if now is None else now
        stored = Trial()
        stored.keep_attributes((store.name, store.held) for store in stores_of(self.captured.graph))
        values |= stored.values
        if differentiate:
            values.update(gradients(outputs, self.setting.names, leaves))
        return values


class _Widen:
    """Makes float64 copies; perturbed, every value moves by up to one rounding of its own dtype.

    Where there are gradients, so does every value on the way: one may be a sum whose terms cancel, as of a bias before
    a batch norm, which no change of the inputs would tell from zero.
    """

    def __init__(self, perturb: bool) -> None:
        self.noise = torch.Generator().manual_seed(0) if perturb else None

    def __call__(self, tensor: Tensor) -> Tensor:
        wide = tensor.detach().to(torch.float64, copy=True)
        return wide if self.noise is None else self.moved(wide, tensor.dtype)

    def moved(self, wide: Tensor, dtype: torch.dtype) -> Tensor:
        noise = torch.rand(wide.shape, generator=self.noise, device="cpu").to(wide.device)
        return wide * (1 + torch.finfo(dtype).eps * (2 * noise - 1))


def _none() -> None:
    return None


def _max_error(eager: Trial, ours: Trial) -> float:
    pairs = [(value, ours.values[name]) for name, value in eager.values.items() if name in ours.values]
    return max((largest_difference(a.detach(), b.detach()) for a, b in pairs if a.shape == b.shape), default=0.0)


def _different_form(expected: Tensor, found: Tensor, strides: bool) -> str:
    """What of shape, dtype, device, requires_grad or (with `strides`) contiguity differs."""
    for what in ("shape", "dtype", "device", "requires_grad"):
        a, b = getattr(expected, what), getattr(found, what)
        if a != b:
            return f"expected {what} {a}, found {b}"
    if strides and expected.is_contiguous() and not found.is_contiguous():
        return f"expected a contiguous tensor, found strides {found.stride()} for shape {tuple(found.shape)}"
    return ""
