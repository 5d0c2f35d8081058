"""Marked branches as calls: `fork` in front, `leave` behind, `join` before the first reader (kernels/side_stream.py).

Until this last step a branch is only marks on its nodes, so that a graph reads, and is analysed, as if there were none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch.fx import Graph, Node

from fxopt.kernels.side_stream import fork, join, leave
from fxopt.patterns.branches import SIDE


def lower_branches(graph: Graph) -> None:
    """A branch that is no longer one, because something stands between its nodes, stays on the main stream."""
    branches: dict[object, list[Node]] = {}
    for node in graph.nodes:
        if SIDE in node.meta:
            branches.setdefault(node.meta[SIDE], []).append(node)
    lowered = [_lower(graph, nodes) for nodes in branches.values() if _is_closed(nodes)]
    if any(lowered):
        graph.on_generate_code(lambda _: _joining_after_errors)


def _is_closed(nodes: Sequence[Node]) -> bool:
    """Whether they follow one another."""
    return all(left.next is right for left, right in itertools.pairwise(nodes))


def _lower(graph: Graph, nodes: Sequence[Node]) -> bool:
    """False where nothing runs beside them."""
    inside = set(nodes)
    reader = min((user for node in nodes for user in node.users if user not in inside), default=nodes[-1].next)
    if reader is nodes[-1].next:
        return False
    with graph.inserting_before(nodes[0]):
        branch = graph.call_function(fork)
    with graph.inserting_after(nodes[-1]):
        graph.call_function(leave, (branch,))
    with graph.inserting_before(reader):
        graph.call_function(join, (branch, *_reads(nodes)))
    return True


def _reads(nodes: Sequence[Node]) -> list[Node]:
    """What they read and do not make; inputs and constants, of which there may be thousands, live long enough."""
    found = dict.fromkeys(read for node in nodes for read in node.all_input_nodes if read.op == "call_function")
    return [read for read in found if read not in nodes]


def _joining_after_errors(body: list[str]) -> list[str]:
    """The lines of a forward that joins its branches before an error leaves it; until then they are local variables."""
    lines = "".join(body).splitlines()
    return [
        "try:\n",
        *(f"    {line}\n" for line in lines),
        "except BaseException:\n",
        f"    from {join.__module__} import join_all\n",
        "    join_all(tuple(locals().values()))\n",
        "    raise\n",
    ]
