"""Outside of fxopt/torch_internals no file of fxopt touches what is private to torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.test_architecture import layer_of, modules

# Private to torch in name alone.
NO_SECRETS = {
    "torch._assert": "documented, and has no other name",
    "torch._check": "documented, and has no other name",
    "torch._ops.OpOverload": "the type of the operators in a graph",
    "torch.utils._python_dispatch.TorchDispatchMode": "the documented way to extend torch",
    "torch.utils._pytree": "where users register containers of their own",
    "torch.utils._sympy": "the terms that sizes consist of",
}
# The same for what objects of torch (and of Python: frames, locks) hold.
MEMBERS = {
    "_schema": "an operator says nowhere else what it takes and gives",
    "_parameters": "of nn.Module, whose subclasses read it", "_buffers": "as _parameters", "_modules": "as _parameters",
    "_forward_hooks": "as _parameters", "_forward_pre_hooks": "as _parameters",
    "_version": "documented with in-place edits of tensors",
    "_indices": "of a sparse tensor that is not coalesced", "_values": "as _indices",
    "_fxopt": "ours, in a slot",
    "_getframe": "of Python's sys", "_at_fork_reinit": "of Python's locks",
}  # fmt: skip
# Public names of what only the tracer and its symbol tables have.
INTERNAL = {"backed_var_to_val", "bound_sympy", "suppress_guards", "tensor_tracker", "var_to_range"}


def is_private(name: str) -> bool:
    """Whether a dotted name of torch is one that the next release may change without a word."""
    if any(name == known or name.startswith(f"{known}.") or known.startswith(f"{name}.") for known in NO_SECRETS):
        return False
    parts = [part for part in name.split(".") if not part.startswith("__")]
    operator = parts[:2] == ["torch", "ops"]  # by its name in a graph
    return not operator and ("experimental" in parts or any(part.startswith("_") for part in parts))


def names_of_torch(tree: ast.AST) -> dict[str, str]:
    """What the names that a file imports from torch stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update({a.asname or "torch": a.name for a in node.names if a.name.split(".")[0] == "torch"})
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return found


def uses_of_torch(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that a file imports from torch, or reads of that."""
    known = names_of_torch(tree)
    yield from ((0, whole) for whole in known.values())
    for line, base, parts in _chains(tree):
        if base in known:
            yield line, ".".join(["torch" if base == "torch" else known[base], *parts])


def _chains(tree: ast.AST) -> Iterator[tuple[int, str, list[str]]]:
    """Every a.b.c as its line, "a", which is empty where no name stands first, and ["b", "c"]."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts, root = [node.attr], node.value
            while isinstance(root, ast.Attribute):
                parts, root = [root.attr, *parts], root.value
            yield node.lineno, root.id if isinstance(root, ast.Name) else "", parts


def secrets(name: str, source: str) -> list[str]:
    """What a file uses that is private to torch: modules, functions, and members of objects."""
    tree = ast.parse(source)
    known = {*names_of_torch(tree), "aten"}
    own = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    own |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    found = [(line, whole) for line, whole in uses_of_torch(tree) if is_private(whole)]
    for line, base, parts in _chains(tree):
        if base not in known and not (base in ("self", "cls") and len(parts) == 1) and _is_inner(parts, own):
            found.append((line, ".".join(parts)))
    return [f"{name}, line {line}: {what}" for line, what in found]


def _is_inner(parts: list[str], own: set[str]) -> bool:
    last = parts[-1]
    if last in INTERNAL or (parts[-2:-1] == ["node"] and last in ("expr", "hint", "shape_env")):
        return True
    return last.startswith("_") and not last.startswith("__") and last not in own | MEMBERS.keys()


def test_what_is_private_to_torch_has_a_room_of_its_own() -> None:
    others = {name: source for name, source in modules().items() if layer_of(name) != "torch_internals"}
    found = [line for name, source in others.items() for line in secrets(name, source)]
    assert not found, "ask for it through fxopt/torch_internals, and add a test to tests/torch_internals"


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._is_alias_of(x, y)",
        "from torch._subclasses import FakeTensor",
        "from torch.fx.experimental.proxy_tensor import make_fx",
        "import torch.fx.experimental.proxy_tensor as p",
        "def f():\n    from torch import _C",
        "from torch.utils import _device as device",
        "number = x.untyped_storage()._cdata",
        "node = graph._root",
        "term = size.node.expr",
        "from torch import fx\nfx.graph._target_to_str",
    ],
)
def test_secrets_are_seen(source: str) -> None:
    assert secrets("shape.sizes", source)


def test_what_is_no_secret_is_allowed() -> None:
    source = (
        "import torch\nfrom torch._ops import OpOverload\ntorch._ops.OpOverload\ntorch.ops.aten._to_copy\nf._schema"
    )
    assert not secrets("shape.sizes", source)
