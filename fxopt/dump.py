"""`Config(dump=...)`: the graph behind each pass that changed it, as text and as a picture."""

from __future__ import annotations

import logging
from pathlib import Path

from torch.fx import Graph, Node

from fxopt.drawing import shape_text, svg

_log = logging.getLogger(__name__)


class Dump:
    """The files of one capture, in a folder of their own: 00_captured.txt and 00_captured.svg, 01_normalize.txt, ...

    Args:
        folder: where each capture gets a folder, capture_0, capture_1, ...; None: nothing is written.
    """

    def __init__(self, folder: str | None) -> None:
        self._root = Path(folder) if folder is not None else None
        self._folder: Path | None = None
        self._written = 0

    def graph(self, name: str, graph: Graph) -> None:
        """The graph as it is now. What cannot be written is a warning and changes nothing else."""
        if self._root is None:
            return
        try:
            self._folder = self._folder or _fresh(self._root)
            stem = f"{self._written:02}_{name}"
            (self._folder / f"{stem}.txt").write_text("\n".join(map(_line, graph.nodes)) + "\n")
            (self._folder / f"{stem}.svg").write_text(svg(graph))
        except OSError as error:
            _log.warning("Config.dump: cannot write to %s: %s", self._root, error)
            self._root = None
        self._written += 1


def _fresh(root: Path) -> Path:
    """The first folder of its kind that is not there yet."""
    for number in range(10_000):
        folder = root / f"capture_{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"Config.dump: expected a folder with fewer than 10,000 captures, found {root}")


def _line(node: Node) -> str:
    remark = f"{shape_text(node)} {node.meta.get('place', '')}".strip()
    return (node.format_node() or f"{node.name}: {node.op}") + (f"  # {remark}" if remark else "")
