"""What the operators of a graph are there for: how many look up, check, reshape or compute."""

from __future__ import annotations

from collections import Counter

from torch.fx import Graph, Node

from fxopt.report.data import Tally
from fxopt.report.kinds import is_integer, is_lookup, is_operator, name_of
from fxopt.shape.aliases import is_view

LOOKUP = "table lookups"
CHECK = "checks of ids"
SHAPE = "shape operators"
COMPUTE = "everything else"
ROLES = (LOOKUP, CHECK, SHAPE, COMPUTE)

_COMPARES = {
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "logical_and",
    "logical_or",
    "logical_not",
    "bitwise_not",
    "isnan",
    "isfinite",
}
_BOUNDS = {"clamp", "clip", "clamp_min", "clamp_max", "where", "masked_fill", "remainder", "fmod", "abs", "relu"}
_FILTERS = {"masked_select", "nonzero", "nonzero_numpy", "unique_dim", "_unique2", "unique_consecutive", "all", "any"}
_GUARDS = {"_assert_async", "_assert_scalar", "_assert_tensor_metadata", "nan_to_num"}
_MOVES = {
    "cat",
    "concat",
    "stack",
    "hstack",
    "vstack",
    "dstack",
    "column_stack",
    "repeat",
    "tile",
    "clone",
    "contiguous",
    "chunk",
    "split",
    "copy",
}
_CASTS = {"to", "_to_copy", "type_as", "lift_fresh_copy", "reshape", "flatten"}
_FRESH = {"zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "arange"}


def census(before: Graph, after: Graph) -> tuple[Tally, ...]:
    """Operators per call by role, as captured and as they run now; roles that neither graph has are left out."""
    old, new = _counted(before), _counted(after)
    return tuple(Tally(role, old[role], new[role]) for role in ROLES if old[role] or new[role])


def _counted(graph: Graph) -> Counter[str]:
    found = Counter(role_of(node) for node in graph.nodes if is_operator(node))
    for node in graph.nodes:
        if "inner" in node.meta:
            found += _counted(node.meta["inner"])
        else:
            found[COMPUTE] += node.meta.get("calls", 0)  # of packed functions
    return found


def role_of(node: Node) -> str:
    """What an operator is there for. A comparison or a clamp counts as a check where its operand holds integers."""
    name = name_of(node)
    if is_lookup(node):
        return LOOKUP
    if name in _FILTERS | _GUARDS or (name in _COMPARES | _BOUNDS and _reads_integers(node)):
        return CHECK
    return SHAPE if is_view(node) or name in _MOVES | _CASTS | _FRESH else COMPUTE


def _reads_integers(node: Node) -> bool:
    return any(is_integer(source) for source in node.all_input_nodes)
