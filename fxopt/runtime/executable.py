"""What compiling one input signature of one model yields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from fxopt.findings import Findings

if TYPE_CHECKING:
    from fxopt.capture import Capture

BAD_ID = "fxopt-bad-id"


def explain_nothing(error: RuntimeError) -> Exception:
    return IndexError(str(error))


@dataclass
class Executable:
    """A capture and the function that now computes it.

    Attributes:
        capture: the signature: state slots, inputs, constants, structures, guards.
        run: ``run(*state, *inputs)`` returns the flat outputs, in the order of ``capture.out_spec``.
        findings: what was done to it.
        graph: the rewritten graph, as the report shows it (`run` calls the same operators by shorter ways).
        explain: turns a RuntimeError whose text starts with ``BAD_ID`` into the IndexError that eager would raise.
    """

    capture: Capture
    run: Callable[..., Sequence[Any]]
    findings: Findings = field(default_factory=Findings)
    graph: fx.GraphModule | None = None
    explain: Callable[[RuntimeError], Exception] = explain_nothing


Compile = Callable[[nn.Module, tuple, dict], Executable]
