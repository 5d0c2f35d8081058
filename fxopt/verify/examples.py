"""What the graphs of one capture are compared with eager on, made once for all verdicts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx, nn

from fxopt import trees
from fxopt.capture import Capture
from fxopt.config import Config
from fxopt.runtime.executable import Executable
from fxopt.verify.check import Comparison, Verdict
from fxopt.verify.resized import resized
from fxopt.verify.trial import Setting
from fxopt.verify.witness import Witnesses

_FURTHER_BATCHES = (0, 1, 3)
_ADVICE = "A first call whose sizes are above 1, and differ from each other and from the model's, serves others too"


def verify(
    executable: Executable, baseline: fx.GraphModule, model: nn.Module, args: tuple, kwargs: dict, config: Config
) -> Verdict:
    """Compare `executable` with `model` on these inputs alone: see :class:`Examples`.

    Args:
        baseline: the captured graph before any rewrite: ``forward(*state, *inputs)``.
    """
    captured = replace(executable.capture, graph=baseline)
    return Examples(captured, model, args, kwargs, config, witness=False).verdict(executable)


class Examples:
    """Inputs on which every graph of one capture is compared with eager, and what eager makes of them.

    Outputs (values, shapes, dtypes, devices, contiguity, requires_grad) and whatever state and inputs a call mutates
    must agree within the error budget; where eager raises, the same type of exception, or a special kind of it, must be
    raised. There are the call's own inputs; with `witness`, where their sizes or rows could be taken for one another,
    made-up ones (see witness.py); and at level "full" batch sizes 0, 1 and 3, and gradients (where grad mode is on) of
    every parameter and float input. Level "off" compares nothing. Neither the model nor the inputs are touched.

    Attributes:
        witness: the sizes that were made up, in words; "" where none were needed, or none could be.
        untold: why none could be made up and what follows, "" where they were or need not be.
        guards: those of the capture, for sizes that the examples can vouch for.
    """

    def __init__(
        self, captured: Capture, model: nn.Module, args: tuple, kwargs: dict, config: Config, witness: bool = True
    ) -> None:
        self.captured, self.model = captured, model
        self.share = config.max_error if config.lossy else None
        self.witness, self.untold = "", ""
        self.guards = captured.guards
        self.comparisons: list[Comparison] = []
        if config.verify == "off":
            return
        inputs = [leaf for leaf in trees.leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        full = config.verify == "full"
        with _recording():
            self.gradients = full and torch.is_grad_enabled()  # a capture without gradients need not have any
            own = self._compared("", inputs)
            self.comparisons.append(own)
            if witness and own.eager.error is None:
                self._add_witness(inputs)
            for size in _FURTHER_BATCHES if full else ():
                self._add_batch(size, inputs)

    def verdict(self, executable: Executable) -> Verdict:
        """Whether `executable` may stand for the model: what is wrong with the first inputs on which it may not."""
        error: float | None = None
        with _recording():
            for comparison in self.comparisons:
                verdict = comparison.verdict(executable)
                error = max(error or 0.0, verdict.max_error or 0.0)
                if not verdict.ok:
                    return replace(verdict, max_error=error)
        return Verdict(True, error)

    @property
    def served(self) -> bool:
        """Whether the capture is for the call's own inputs, if eager is."""
        own = self.comparisons[:1]
        return all(each.served or each.eager.error is not None for each in own)

    def _compared(self, where: str, inputs: Sequence[Tensor]) -> Comparison:
        setting = Setting(self.captured, inputs, self.gradients)
        return Comparison(where, self.captured, self.model, setting, self.share)

    def _add_witness(self, inputs: Sequence[Tensor]) -> None:
        witnesses = Witnesses(self.captured, inputs, lambda: self.captured.state_of(self.model))
        if not witnesses.needed:
            return
        for made in witnesses.tries():
            comparison = self._compared(f"at sizes {made.sizes}: ", made.inputs)
            if comparison.eager.error is None and comparison.served:
                self.comparisons.append(comparison)
                self.witness = made.sizes
                return
        self.guards, served = witnesses.narrowed()
        self.untold = f"only the call's own sizes were compared with eager: {witnesses.reason}"
        self.untold += f"; so the graph serves calls with {served} alone. {_ADVICE}" if served else ""

    def _add_batch(self, size: int, inputs: Sequence[Tensor]) -> None:
        others = resized(self.captured.graph, self.captured.state_of(self.model), inputs, size)
        if others is not None and self.captured.guards.holds(others):
            comparison = self._compared(f"at batch size {size}: ", others)
            if comparison.eager.error is None and comparison.served:
                self.comparisons.append(comparison)


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """In inference mode no tensor would count its versions, or become a leaf."""
    gradients_on = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(gradients_on):
        yield
