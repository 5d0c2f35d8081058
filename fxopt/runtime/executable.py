"""What compiling one input signature of one model yields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from fxopt.findings import Findings
from fxopt.runtime.turns import Turns
from fxopt.shape.conditions import OtherSizes

if TYPE_CHECKING:
    from fxopt.capture import Capture


@dataclass
class Executable:
    """A capture and the function that now computes it.

    Attributes:
        capture: the signature: state slots, inputs, constants, structures, guards.
        run: ``run(*state, *inputs)`` returns the flat outputs, in the order of ``capture.out_spec``.
        findings: what was done to it.
        graph: the rewritten graph, as the report shows it (`run` calls the same operators by shorter ways).
        model: what was captured. Nodes of the graphs hold it weakly.
        turns: decides which calls are the graph's; None: all.
    """

    capture: Capture
    run: Callable[..., Sequence[Any]]
    findings: Findings = field(default_factory=Findings)
    graph: fx.GraphModule | None = None
    model: nn.Module | None = None
    turns: Turns | None = None


def has_own_backward(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether it is a call whose backward is not the graph's: a checkpointed region, or a user's autograd.Function."""
    return node.op == "call_module" and hasattr(module.get_submodule(str(node.target)), "own_backward")


Compile = Callable[[nn.Module, tuple, dict, "list[Capture]"], Executable]


def run_eagerly(failure: Exception, eager: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """What to do after a graph raised `failure`: eager decides whether the call is an error, and of which kind.

    Returns eager's result. Raises eager's own error, from the user's own line; or `failure` where that is a more
    special kind of the same error (an id outside its table, by the name of its column), about an earlier call, or about
    inputs by which eager would read outside of memory.
    """
    try:
        if getattr(failure, "late", False) or getattr(failure, "unsafe", False):
            raise failure
        return eager(*args, **kwargs)
    except Exception as own:
        special = type(failure) is not type(own) and isinstance(failure, type(own))
        if special and not isinstance(failure, OtherSizes):
            raise failure from None
        raise
    finally:
        del failure  # an error that leads to itself keeps the call's tensors until a collection of garbage
