"""What need not wait for one another on CUDA, beside each other in captured graphs."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from fxopt.patterns.branches import BESIDE, SIDE, find_branches, launches
from fxopt.rewrites.framework import Editor, Match, Policy, Replacement, Rewrite
from fxopt.rewrites.framework.regions import Region


def replace_branch(editor: Editor, match: Match) -> Replacement:
    """The same calls, those of the branch in front and marked; `direct` puts them on another stream (forks.py)."""
    side, main = match.bound["side"], match.bound["main"]
    inside = {*side, *main}
    outputs = [node for node in sorted(inside) if not inside.issuperset(node.users)]
    editor.point = min(user for node in outputs for user in node.users if user not in inside)
    editor.hoist_for(Region([*side, *main], []).reads)
    twins = editor.twins([*side, *main])
    for nodes, mark in ((side, SIDE), (main, BESIDE)):
        for node in nodes:
            twins[node].meta[mark] = twins[side[0]].name
    what = f"{_words(side)} beside {_words(main)}, in captured graphs"
    return Replacement({node: twins[node] for node in outputs}, what, "neither needs the results of the other")


def _words(nodes: Sequence[Node]) -> str:
    """How many operators, and which, for a report."""
    count = sum(map(launches, nodes))
    return f"{count} operator{'s' * (count != 1)} ({nodes[0].name} to {nodes[-1].name})"


REWRITE = Rewrite(
    "branches",
    find_branches,
    replace_branch,
    policy=Policy(measured=True, proof=True, everywhere=True),
    why="last: nothing that looks for neighbours comes after it",
    when=lambda config: config.lower != "inductor",  # islands are cut out of the graph afterwards
)
