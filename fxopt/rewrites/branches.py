"""What need not wait for one another on CUDA, beside each other in captured graphs."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from fxopt.patterns.branches import BESIDE, SIDE, find_branches, launches
from fxopt.patterns.core import Match
from fxopt.rewrites.core import Replacement, Rewrite
from fxopt.rewrites.editor import Editor
from fxopt.rewrites.regions import Region
from fxopt.shape.aliases import Aliases


def replace_branch(editor: Editor, match: Match) -> Replacement:
    """The same calls, those of the branch in front and marked; `direct` puts them on another stream (forks.py)."""
    side, main = match.bound["side"], match.bound["main"]
    outputs = move_to_readers(editor, [*side, *main])
    twins = editor.twins([*side, *main])
    for nodes, mark in ((side, SIDE), (main, BESIDE)):
        for node in nodes:
            twins[node].meta[mark] = twins[side[0]].name
    what = f"{words(side)} beside {words(main)}, in captured graphs"
    return Replacement({node: twins[node] for node in outputs}, what, "neither needs the results of the other")


def move_to_readers(editor: Editor, nodes: Sequence[Node]) -> list[Node]:
    """Makes the point that of the first reader of `nodes`, and gives those that are read by others than `nodes`."""
    inside = set(nodes)
    outputs = [node for node in sorted(inside) if not inside.issuperset(node.users)]
    editor.point = min(user for node in outputs for user in node.users if user not in inside)
    editor.hoist_for(Region(nodes, []).reads, Aliases(editor.module.graph))
    return outputs


def words(nodes: Sequence[Node]) -> str:
    """How many operators, and which, for a report."""
    count = sum(map(launches, nodes))
    return f"{count} operator{'s' * (count != 1)} ({nodes[0].name} to {nodes[-1].name})"


REWRITE = Rewrite(
    "branches",
    find_branches,
    replace_branch,
    measured=True,
    proof=True,
    everywhere=True,
    why="last: nothing that looks for neighbours comes after it",
)
