"""Index programs: what happens to an id between the model's input and the table it is looked up in.

Walking up from an id tensor, every operator that the columns kernel can run on the fly becomes a step of the
program (index_steps.py) or a change of the view (view_operators.py); the first one that it cannot becomes the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch._ops import OpOverload
from torch.fx import Graph, Node

from fxopt.kernels.columns.plan import Instr, Op
from fxopt.patterns.core import Reject, calls_of_ours
from fxopt.patterns.embedding_columns.index_steps import HANDLERS
from fxopt.patterns.embedding_columns.index_value import IndexValue, Step, itself, name_of
from fxopt.patterns.jagged.segments import Segments
from fxopt.shape.aliases import Aliases
from fxopt.shape.calls import is_pointwise
from fxopt.shape.sizes import same_shape, shape_of, static, tensor_of
from fxopt.shape.view_operators import through

_OF_TWO = (Op.SAVE, Op.SWAP, Op.COMBINE, Op.WHERE)


def left_in_front(graph: Graph) -> Iterator[Reject]:
    """The operators whose results the columns read, though they work element by element as steps do."""
    for call in calls_of_ours(graph, "fxopt::columns"):
        for source in call.args[0]:  # type: ignore[union-attr]
            if isinstance(source, Node) and _computes_ids(source):
                why = f"{source.target} makes ids in front of their lookup: a step takes one value and constants"
                yield Reject(why, source)


def _computes_ids(node: Node) -> bool:
    if not isinstance(node.target, OpOverload) or not is_pointwise(node.target) or tensor_of(node) is None:
        return False
    return not node.meta["val"].dtype.is_floating_point and any(static(size) is None for size in shape_of(node))


class IndexPrograms:
    """Describes the id tensors of one graph; remembers what it has seen."""

    def __init__(self, aliases: Aliases, segments: Segments) -> None:
        self._aliases = aliases
        self._segments = segments
        self._seen: dict[Node, IndexValue] = {}

    def describe(self, node: Node) -> IndexValue:
        """The longest program that computes `node`; the empty one over `node` itself where nothing fits."""
        if node not in self._seen:
            self._seen[node] = self._step(node) or itself(node)
        return self._seen[node]

    def over_view(self, node: Node) -> IndexValue | None:
        """The same program over the view that it reads, as a tensor of its own, which the kernel need not cut out.

        None where more than one value takes part in a step, or where views stand between the steps.
        """
        program, source = self.describe(node).program, node
        if any(step.operand is not None or step.instr.op in _OF_TWO for step in program):
            return None
        while self.describe(source).program:
            before = source.args[0] if source.args else None
            if through(source) is not None or not isinstance(before, Node) or not same_shape(before, source):
                return None
            source = before
        return itself(source, program)

    def edited(self, value: IndexValue) -> Node | None:
        """A tensor that the program reads and that the model edits in place, if there is one."""
        return next(filter(self._aliases.edited, value.reads), None)

    def is_edited(self, node: Node) -> bool:
        """Whether a node, or what it reads, is edited in place: its value is then not what the graph says."""
        return any(map(self._aliases.edited, (node, *node.all_input_nodes)))

    def _step(self, node: Node) -> IndexValue | None:
        if node.op != "call_function" or tensor_of(node) is None or self.is_edited(node) or self._segments.of(node):
            return None
        if (viewed := through(node)) is not None:
            value = self.describe(viewed[0])
            view = value.view.after(viewed[1])
            if view is None or (value.per_lane and view.axes[-1:] != value.view.axes[-1:]):
                return None
            return replace(value, view=view)
        handler = HANDLERS.get(node.target)
        return handler(self, node) if handler else None

    def then(self, node: Node, source: Node, *steps: Step) -> IndexValue | None:
        """`source`'s value, cast to `node`'s dtype if torch promotes it, then `steps`."""
        if tensor_of(source) is None or not same_shape(source, node):
            return None
        value, dtype = self.describe(source), node.meta["val"].dtype
        cast = () if dtype == source.meta["val"].dtype else (Step(Instr(Op.CAST, name_of(dtype))),)
        return replace(value, program=(*value.program, *cast, *steps))
