"""A question about data in Python, such as `if mask.any():`, to which both answers are good: the first call's is taken.

It is computed from the example, by what the trace has recorded so far. The graph asks again at each call, before
anything depends on it, and a call with another answer is eager's (shape/conditions.py). So no answer needs to be right:
behind random numbers it is that of others, which are drawn, and put back, as in a trial (runtime/attempts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fxopt.capture.decided import is_made_up, sources_of
from fxopt.capture.errors import OtherData
from fxopt.capture.proofs import Proofs
from fxopt.findings import Miss
from fxopt.shape.aliases import edits_only, is_pure, is_random, mutates
from fxopt.shape.calls import closure
from fxopt.shape.conditions import holds
from fxopt.torch_internals.modes import no_dispatch_modes, no_function_modes

_MOST = 16  # in a trace: a loop over data is no question


@contextmanager
def _unless_refused() -> Iterator[None]:
    """What cannot be computed, or raises for this data, has no answer."""
    try:
        yield
    except OtherData:
        raise
    except Exception:
        pass


class Answers:
    """The answers of one trace.

    Args:
        decided: what the trace takes for granted, such as that no check of the user's raises.
        reals: the tensors of the first placeholders, in order.
        takes: whether any may be taken.

    Attributes:
        taken: what a report says of each.
    """

    def __init__(
        self, tracer: Any, proofs: Proofs, decided: dict[sympy.Basic, None], reals: Sequence[Tensor], takes: bool
    ) -> None:
        self._tracer, self._proofs, self._decided = tracer, proofs, decided
        self._held = 0  # so many of these do for the first call
        self._reals = reals if takes else ()
        self._values: dict[Node, Any] = {}
        self.taken: list[Miss] = []

    def of(self, tensor: Tensor) -> bool | None:
        """Whether it is true in the first call; None where that cannot be told."""
        node = self._proofs.node_of(tensor)
        return None if node is None else self._told(lambda: bool(self._value(node)))

    def of_condition(self, condition: sympy.Basic) -> bool | None:
        """The same of a condition on sizes and numbers of tensors."""
        return self._told(lambda: self._holds(condition))

    def _told(self, question: Callable[[], bool]) -> bool | None:
        if not self._reals or len(self.taken) == _MOST:
            return None
        with (
            _unless_refused(),
            no_function_modes(),
            no_dispatch_modes(),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            self._hold()
            answer = question()
            place = self._tracer.here()
            told = "yes" if answer else "no"
            reason = f"asks about data, and the graph is for the answer {told}; calls with the other one are eager"
            self.taken.append(Miss("answers", reason, place))
            return answer
        return None

    def _hold(self) -> None:
        """Ask the first call what the trace has taken for granted so far: an operator behind a check of the user's may
        read outside of memory for data that the check refuses."""
        known = sources_of(self._tracer.graph)
        for condition in [*self._decided][self._held :]:
            if not (is_made_up(condition, known) or self._holds(condition)):
                raise OtherData("asks about data behind a check that this call fails", self._tracer.here())
            self._held += 1

    def _holds(self, condition: sympy.Basic) -> bool:
        known = sources_of(self._tracer.graph)
        symbols = sorted(condition.free_symbols, key=str)
        numbers = (self._number(*known[symbol]) for symbol in symbols)
        return holds(condition, symbols, numbers)

    def _number(self, node: Node, dim: int | None) -> Any:
        value = self._value(node)
        return value if dim is None else value.shape[dim]

    def _value(self, node: Node) -> Any:
        """What a node is in the first call."""
        wanted = closure([node], lambda each: [*each.all_input_nodes, *self._proofs.edits_of(each)])
        if any(map(mutates, wanted)):  # what was computed before may be from before or behind an edit
            self._values.clear()
        inputs = iter(self._reals)
        for each in self._tracer.graph.nodes:
            real = next(inputs, None) if each.op == "placeholder" else None
            if each in wanted and each not in self._values:
                self._values[each] = self._run(each) if real is None else self._given(each, real)
        return self._values[node]

    def _run(self, node: Node) -> Any:
        if node.op == "get_attr":
            return self._given(node, getattr(self._tracer.root, str(node.target)))
        if not (is_pure(node) or is_random(node) or edits_only(node)):
            raise LookupError(f"{node} is more than a value")
        args, kwargs = map_arg((node.args, node.kwargs), self._values.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _given(self, node: Node, real: Any) -> Any:
        """What the graph does not make itself: copied where it edits that, for the call is yet to come."""
        return real.clone() if self._proofs.edits_of(node) else real
