"""Every name of torch that fxopt uses privately is there: what a new release of torch breaks, it breaks here first."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch_internals.test_borders import uses_of_torch

PACKAGE = Path(__file__).resolve().parents[2] / "fxopt"
ROOMS = sorted(path.stem for path in (PACKAGE / "torch_internals").glob("[!_]*.py"))


def exists(name: str) -> bool:
    """Whether a dotted name leads to a module of torch, or to what one holds."""
    parts = name.split(".")
    held: Any = torch
    for count, part in enumerate(parts[1:], 2):
        try:
            held = getattr(held, part) if hasattr(held, part) else importlib.import_module(".".join(parts[:count]))
        except ImportError:
            return False
    return True


def dependents(room: str) -> str:
    """The files of fxopt that import a room, in words."""
    wanted = f"torch_internals.{room} import", f"torch_internals import {room}"
    files = [path for path in PACKAGE.rglob("*.py") if any(each in path.read_text() for each in wanted)]
    return ", ".join(str(path.relative_to(PACKAGE.parent)) for path in files)


@pytest.mark.parametrize("room", ROOMS)
def test_torch_has_the_names(room: str) -> None:
    tree = ast.parse((PACKAGE / "torch_internals" / f"{room}.py").read_text())
    gone = sorted(
        name for name in {name for _, name in uses_of_torch(tree)} if not exists(name) and not _of_another_build(name)
    )
    assert not gone, f"torch {torch.__version__} has no {', '.join(gone)}; on {room}.py depend {dependents(room)}"


def _of_another_build(name: str) -> bool:
    return "_cuda_" in name and torch.version.cuda is None


def test_a_name_that_is_gone_is_seen() -> None:
    source = "import torch\nfrom torch._C import _left as left\nfrom torch import fx\nfx._right(torch._C._nn)"
    found = {name for _, name in uses_of_torch(ast.parse(source))}
    assert sorted(name for name in found if not exists(name)) == ["torch._C._left", "torch.fx._right"]


def overrides(room: str) -> Iterator[tuple[type, type, str]]:
    """(class, class of torch, method) for all that a room's classes define anew."""
    module: Any = importlib.import_module(f"fxopt.torch_internals.{room}")
    for kind in vars(module).values():
        if inspect.isclass(kind) and kind.__module__ == module.__name__ and kind.__base__ is not object:
            yield from ((kind, kind.__base__, name) for name, value in vars(kind).items() if inspect.isfunction(value))


# Ours, and called by us.
NEW = {
    "size", "learn", "_elementwise", "_row_by_row", "_is_input_size", "_make_one", "_evaluated", "_has_elements",
    "_are_one_unless_empty", "_are_present", "_have_equal_factors", "_has_room", "unknown",
}  # fmt: skip


@pytest.mark.parametrize("room", ["shape_env", "elementwise"])
def test_what_is_overridden_is_asked_for(room: str) -> None:
    """A method that torch no longer has would be overridden in vain, and nobody would notice."""
    lost = [
        f"{base.__name__}.{name}" for _, base, name in overrides(room) if name not in NEW and not hasattr(base, name)
    ]
    assert not lost, f"torch {torch.__version__} has no {', '.join(lost)} to override; the capture depends on {room}.py"


def test_every_room_is_lived_in() -> None:
    """Nothing stands here that fxopt does not use: every name is read somewhere besides where it is made."""
    words = Counter(re.findall(r"\w+", "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))))
    trees = {room: ast.parse((PACKAGE / "torch_internals" / f"{room}.py").read_text()) for room in ROOMS}
    idle = [f"{room}.{name}" for room, tree in trees.items() for name in _made(tree) if words[name] == 1]
    assert not idle, f"nobody uses {', '.join(idle)}"


def _made(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
