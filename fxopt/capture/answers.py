"""A question about data in Python, such as `if mask.any():`, to which both answers are good: the first call's is taken.

It is computed from the example, by what the trace has recorded so far. The graph asks again at each call, before
anything depends on it, and a call with another answer is eager's (shape/conditions.py). So no answer needs to be right:
behind random numbers it is that of others, which are drawn, and put back, as in a trial (runtime/attempts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import dropwhile
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fxopt.capture.decided import Source, is_made_up, sources_of
from fxopt.capture.errors import OtherData
from fxopt.capture.proofs import Proofs
from fxopt.findings import Miss
from fxopt.shape.aliases import edits_only, is_pure, is_random, mutates
from fxopt.shape.calls import closure
from fxopt.shape.conditions import holds
from fxopt.torch_internals.modes import no_dispatch_modes, no_function_modes

_MOST = 16  # in a trace: a loop over data is no question


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
        return self._told(lambda: self._holds(condition, sources_of(self._tracer.graph)))

    def _told(self, question: Callable[[], bool]) -> bool | None:
        if not self._reals or len(self.taken) == _MOST:
            return None
        refused = False
        with (
            suppress(Exception),  # what cannot be computed, or raises for this data, has no answer
            no_function_modes(),
            no_dispatch_modes(),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            refused = self._is_refused()
            if not refused:
                answer = question()
                told = "yes" if answer else "no"
                reason = f"asks about data, and the graph is for the answer {told}; calls with the other one are eager"
                self.taken.append(Miss("answers", reason, self._tracer.here()))
                return answer
        if refused:
            raise OtherData("asks about data behind a check that this call fails", self._tracer.here())
        return None

    def _is_refused(self) -> bool:
        """Whether the first call fails what the trace has taken for granted so far: an operator behind a check of the
        user's may read outside of memory for data that the check refuses."""
        known = sources_of(self._tracer.graph)
        for condition in [*self._decided][self._held :]:
            if not (is_made_up(condition, known) or self._holds(condition, known)):
                return True
            self._held += 1
        return False

    def _holds(self, condition: sympy.Basic, known: dict[sympy.Symbol, Source]) -> bool:
        symbols = sorted(condition.free_symbols, key=str)
        numbers = (self._number(*known[symbol]) for symbol in symbols)
        return holds(condition, symbols, numbers)

    def _number(self, node: Node, dim: int | None) -> Any:
        value = self._value(node)
        return value if dim is None else value.shape[dim]

    def _value(self, node: Node) -> Any:
        """What a node is in the first call."""
        graph = self._tracer.graph
        wanted = closure([node], lambda each: [*each.all_input_nodes, *self._proofs.edits_of(each)])
        nodes = [each for each in graph.nodes if each in wanted]
        missing = [*dropwhile(self._values.__contains__, nodes)]
        if any(map(mutates, missing)):  # what was computed before may be from before or behind an edit
            self._values.clear()
            missing = nodes
        given = dict(zip(graph.find_nodes(op="placeholder"), self._reals, strict=False))
        for each in missing:
            if each not in self._values:
                self._values[each] = self._given(each, given[each]) if each in given else self._run(each)
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
