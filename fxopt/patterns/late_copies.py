"""Embedding columns on CUDA that wait for a tensor only to copy it into their row: a bottom MLP's result."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from fxopt.kernels.columns.plan import Column, Plan
from fxopt.patterns.branches import Cones, first_writer, launches
from fxopt.patterns.core import Match, Reject, calls_of_ours
from fxopt.shape.sizes import shape_of, static, tensor_of

PlanOf = Callable[[Node], Plan]


@dataclass(frozen=True)
class Copy:
    """Tensor `tensor` of the call, whole, from `offset` on in output `output`."""

    tensor: int
    output: int
    offset: int


def find_late_copies(module: GraphModule, inference: bool, plan_of: PlanOf) -> Iterator[Match | Reject]:
    """Matches bind `call`, `plan` (without the copies), `copies`, `side`: what they alone wait for."""
    calls = [call for call in calls_of_ours(module.graph, "fxopt::columns") if launches(call)]
    if not inference or not calls or first_writer(module.graph) is not None:
        return
    cones = Cones(list(module.graph.nodes))
    for call in calls:
        plan = plan_of(call)
        found = _of_call(cones, call, plan)
        if found:
            copied = [column for column in plan.columns if column.source.tensor in found]
            kept = tuple(column for column in plan.columns if column.source.tensor not in found)
            if not _still_written(kept, copied, plan):
                yield Reject("expected a lookup in each output that takes copies, of a known width", call)
            elif not _read_once(call, copied):
                yield Reject("expected each of its outputs read by one node", call)
            else:
                copies = [Copy(column.source.tensor, column.output, column.offset) for column in copied]
                bound = {"plan": replace(plan, columns=kept), "copies": copies, "side": _alone(cones, call, found)}
                yield Match(call, {"call": call, **bound})


def _of_call(cones: Cones, call: Node, plan: Plan) -> set[int]:
    """The tensors, by number, that are only copied and that no other input of the call is made by."""
    tensors: list[Node] = list(call.args[0])  # type: ignore[arg-type]
    found = {k for k, node in enumerate(tensors) if cones.alone([node], []) and _is_copied_whole(node, k, plan)}
    side = _alone(cones, call, found)
    return found if all(tensors[k] in side for k in found) else set()


def _alone(cones: Cones, call: Node, numbers: set[int]) -> list[Node]:
    late = [call.args[0][k] for k in numbers]  # type: ignore[index]
    return cones.alone(late, [node for node in call.all_input_nodes if node not in late])  # type: ignore[arg-type]


def _read_once(call: Node, copied: Sequence[Column]) -> bool:
    """Whether the call is a list of which each item is taken once at most, and those with copies are."""
    items = [user.args[1] for user in call.users if user.target is operator.getitem]
    return len(set(items)) == len(call.users) and {column.output for column in copied} <= set(items)


def _is_copied_whole(node: Node, number: int, plan: Plan) -> bool:
    """Whether it is [B, L] and all that is done with it are copies, all lanes of a row side by side."""
    value, readers = tensor_of(node), [column for column in plan.columns if number in _read(column)]
    if value is None or value.dim() != 2 or static(shape_of(node)[1]) is None:
        return False
    return bool(readers) and all(_is_copy(column, number, static(shape_of(node)[1])) for column in readers)


def _is_copy(column: Column, number: int, lanes: int | None) -> bool:
    source = column.source
    plain = Column(source, None, column.output, column.offset, name=column.name)
    whole = source.tensor == number and source.rows == (0,) and source.lane == 1 and source.start == 0
    return column == plain and whole and source.length in (None, lanes) and not source.fixed


def _read(column: Column) -> set[int]:
    sources = [column.source, column.weights, *(each.source for each in (column.lengths, column.divisor) if each)]
    read = {source.tensor for source in sources if source is not None} | {step.tensor for step in column.program}
    return read | ({column.bag.tensor} if column.bag is not None else set())


def _still_written(kept: Sequence[Column], copied: Sequence[Column], plan: Plan) -> bool:
    """Whether lookups tell the rows of each output that has copies, its width is known, and nothing adds to them."""
    outputs = {column.output for column in copied}
    slots = {(column.output, column.offset) for column in copied}
    told = outputs <= {column.output for column in kept if column.table is not None}
    added_to = any((column.output, column.offset) in slots for column in kept)
    return told and not added_to and all(plan.widths[output] is not None for output in outputs)
