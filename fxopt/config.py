"""What a user may choose. Every field has a default that is safe and fast."""

from __future__ import annotations

from dataclasses import dataclass

VERIFY_LEVELS = ("off", "first", "full")
TUNE_LEVELS = ("off", "fast", "full")
LOWERINGS = ("fx", "inductor")


@dataclass(frozen=True)
class Config:
    """Options of :func:`fxopt.optimize`.

    Args:
        verify: ``"first"`` compares the optimized graph with eager on the inputs of each capture;
            ``"full"`` also compares gradients and further batch sizes; ``"off"`` trusts the rewrites.
        tune: ``"fast"`` times rewrites against what they replace, at most 5 seconds a capture, and leaves out what is
            slower on this machine (timings are remembered beside the compiled kernels); ``"full"`` takes its time and
            more batch sizes; ``"off"`` applies every rewrite that is right.
        lower: ``"fx"`` calls what is left after the rewrites operator by operator; ``"inductor"`` compiles what lies
            between products, lookups and other large operators (seconds, at each capture; its caches work as under
            torch.compile) and calls the rest. Where that fails the graph runs as with ``"fx"``; the report says why.
        disable: names of passes to leave out (see ``fxopt.rewrites.PASSES``).
        max_rewrites: apply at most this many rewrites ("fuel"); used to bisect a wrong answer.
        leaves: module paths, as in ``named_modules()``, that stay opaque.
        max_captures: how many input signatures one model may capture before new ones run eagerly.
        cuda_graphs: without gradients on a CUDA device, replay captured graphs, one for each bucket of batch sizes.
    """

    verify: str = "first"
    tune: str = "fast"
    lower: str = "fx"
    disable: tuple[str, ...] = ()
    max_rewrites: int | None = None
    leaves: tuple[str, ...] = ()
    max_captures: int = 16
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        if self.verify not in VERIFY_LEVELS:
            raise ValueError(f"Config.verify: expected one of {VERIFY_LEVELS}, found {self.verify!r}")
        if self.tune not in TUNE_LEVELS:
            raise ValueError(f"Config.tune: expected one of {TUNE_LEVELS}, found {self.tune!r}")
        if self.lower not in LOWERINGS:
            raise ValueError(f"Config.lower: expected one of {LOWERINGS}, found {self.lower!r}")
        if isinstance(self.disable, str):
            raise TypeError(f"Config.disable: expected a tuple of pass names, found the string {self.disable!r}")
