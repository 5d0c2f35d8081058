"""What the model edits in place stays memory of its own: where eager stacks lanes and edits the stack, an activation
that one call computes for all lanes would be edited under the feet of its backward.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from fxopt.rewrites.framework.editor import Editor, Rejected
from fxopt.rewrites.framework.results import Kept
from fxopt.shape.aliases import Aliases

Values = Mapping[Node, Node | None]


class Edits:
    """Which values of a graph are edited in place."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._aliases = Aliases(graph)
        computed = (node for node in graph.nodes if node.op == "call_function")
        self._any = any(map(self._aliases.edited, computed))  # rewrites add none

    def keep(self, editor: Editor, values: Values) -> Values:
        """The values, with a copy in place of each that eager has in memory of its own and edits.

        Raises:
            Rejected: others read that memory as well, and would miss the edit; or autograd forgets at the edit what it
                knew of a result, if a layer gives it as a view, as some of torch's do.
        """
        if not self._any:
            return values
        if not all(map(self._aliases.knows, values)):
            self._aliases = Aliases(self._graph)
        edited = [(old, new) for old, new in values.items() if new is not None and self._aliases.edited(old)]
        if not edited:
            return values
        kept, after = dict(values), Kept(editor.module, surely=True)
        for old, new in edited:
            if torch.is_grad_enabled() and self._is_edited_past_autograd(old):
                raise Rejected(f"'{old.name}' is returned, and edited through detach() or .data")
            if old in after.sharing(new) or (after.surely_kept(old) and after.keepers(new)):
                continue
            if any(read in self._aliases.sharing(old) for read in old.all_input_nodes):
                raise Rejected(f"'{old.name}' is edited in place, and shares memory with what others read")
            with editor.at(old if editor.point < new else editor.point):
                kept[old] = editor.call(torch.ops.aten.clone.default, new)
        return kept

    def _is_edited_past_autograd(self, value: Node) -> bool:
        ways = torch.ops.aten.detach.default, getattr
        return self._aliases.leaves(value) and any(node.target in ways for node in self._aliases.sharing(value))
