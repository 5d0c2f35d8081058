"""The house rules that a program can check: imports point downwards, one place edits graphs, no machine is named."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fxopt"

# Top to bottom. A module imports from its own layer and from those below it.
LAYERS = (
    {"fxopt", "__main__"},
    {"cli", "doctor"},
    {"report", "export"},
    {"optimize", "integrations"},
    {"stages", "asked"},
    {"verify"},
    {"lowering"},
    {"runtime"},
    {"rewrites"},
    {"tune"},
    {"patterns"},
    {"normalize"},
    {"capture"},
    {"shape"},
    {"optimizers"},
    {"kernels"},
    {
        "autocast",
        "findings",
        "facts",
        "config",
        "callable_module",
        "drawing",
        "dump",
        "locks",
        "machine",
        "names",
        "packages",
        "progress",
        "reach",
        "tracebacks",
        "trees",
    },
    {"torch_internals"},
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
# Narrower than the layers: all that these may import from the package.
ONLY = {
    "patterns": r"patterns|normalize|shape|findings|facts|torch_internals|kernels\.\w+\.(plan|serves)",
    "kernels": r"kernels|autocast|findings|facts|config|locks|progress|torch_internals",
    "tune": r"tune|shape|kernels\.cache|machine|config|locks|torch_internals",
    "shape": r"shape|findings|facts|config|torch_internals",
    "capture": r"capture|shape|autocast|findings|config|locks|names|reach|tracebacks|trees|torch_internals",
}
EDITS = {
    "create_node", "eliminate_dead_code", "erase_node", "inserting_after", "inserting_before", "replace_all_uses_with",
    "replace_input_with", "update_arg", "update_kwarg",
}  # fmt: skip
EDITORS = r"lowering\..*|rewrites\.framework\.(core|editor|direct|forks|indexing|results|sources)"
EDITORS += r"|normalize(\..*)?|capture(\..*)?|runtime\.sharded\.trace"
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
}  # fmt: skip
DRAWERS = {"utils", "util", "helpers", "common", "misc"}


def modules() -> dict[str, str]:
    """Dotted names without the leading "fxopt." (the package itself is "fxopt"), and the sources."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__") or "fxopt"] = path.read_text()
    return found


def layer_of(name: str) -> str:
    return name.split(".")[0]


def nodes_that_run(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            yield from nodes_that_run(child)


def imports(source: str) -> Iterator[str]:
    """Dotted names of everything that is imported, inside functions too; `.plan` stays relative."""
    for node in nodes_that_run(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (f"{node.module}." if node.module else "")
            yield from (start + alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fxopt":
            yield f"fxopt.{node.attr}"  # what a bare `import fxopt` is for


def inner_imports(source: str) -> Iterator[str]:
    """The package's own modules that are imported; a name that the package's front defines is "fxopt".

    The package's file and version belong to no layer.
    """
    for name in imports(source):
        if name.startswith("fxopt.") and not name.startswith("fxopt.__"):
            inner = name.removeprefix("fxopt.")
            yield inner if layer_of(inner) in RANK else "fxopt"


def upward_imports(name: str, source: str) -> list[str]:
    own = layer_of(name)
    allowed = re.compile(rf"({ONLY.get(own, '.*')})(\.|$)")
    return [
        f"{name} imports {target}"
        for target in inner_imports(source)
        if RANK[layer_of(target)] < RANK[own] or not allowed.match(target)
    ]


def edits(name: str, source: str) -> list[str]:
    return [
        f"{name}, line {node.lineno}: {node.func.attr}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in EDITS
    ]


def deviceless(name: str, source: str) -> list[str]:
    """Tensors that are made where the caller's default device is, which is nobody's wish."""
    return [
        f"{name}, line {node.lineno}: torch.{node.func.attr}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in FACTORIES) == ("torch", True)
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


def test_every_module_has_a_layer() -> None:
    assert not [name for name in modules() if layer_of(name) not in RANK], "give the new module a place in LAYERS"


def test_every_module_has_a_room_in_the_design() -> None:
    design = (ROOT / "DESIGN.md").read_text()
    rooms = [path for path in PACKAGE.iterdir() if not path.name.startswith("_") and path.suffix in {"", ".py"}]
    named = {f"{room.name}/" if room.is_dir() else room.name for room in rooms}
    assert not [name for name in sorted(named) if name not in design], "give the new room a line in DESIGN.md"


def test_imports_point_downwards() -> None:
    assert not [line for name, source in modules().items() for line in upward_imports(name, source)]


def test_relative_imports_stay_in_their_layer() -> None:
    """So that the other rules, which read absolute names, see every import between layers."""
    leaving = []
    for name, source in modules().items():
        if name == "fxopt":
            continue
        depth = name.count(".") + (PACKAGE / name.replace(".", "/")).is_dir()
        leaving += [f"{name}: {found}" for found in imports(source) if len(found) - len(found.lstrip(".")) > depth]
    assert not leaving


def test_kernels_know_nothing_of_graphs() -> None:
    assert not [name for name, source in modules().items() if layer_of(name) == "kernels" and "torch.fx" in source]


def test_patterns_name_our_operators() -> None:
    """As attributes of torch.ops they are unknown until their library is loaded."""
    found = [str(path) for path in (PACKAGE / "patterns").rglob("*.py") if "torch.ops.fxopt" in path.read_text()]
    assert not found


def test_only_the_core_edits_graphs() -> None:
    others = {name: source for name, source in modules().items() if not re.fullmatch(EDITORS, name)}
    found = [line for name, source in others.items() for line in edits(name, source)]
    assert not found, (
        "leave the editing of graphs to fxopt/rewrites/framework/core.py (and the last lowering to direct.py)"
    )


def test_every_new_tensor_names_its_device() -> None:
    assert not [line for name, source in modules().items() for line in deviceless(name, source)]


def test_no_drawer_for_everything() -> None:
    assert not [name for name in modules() if name.split(".")[-1] in DRAWERS]


def test_no_machine_paths() -> None:
    machine = re.compile(r"(?<![\w.])/(home|root|work|Users|opt|mnt)/\w")
    folders = ("fxopt", "bench", "docs", "examples", "tests", ".ci")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.*")]
    files += [*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "Makefile", ROOT / ".ci/setup", ROOT / ".ci/run"]
    read = [file for file in files if file.suffix in {"", ".cpp", ".cu", ".cuh", ".h", ".md", ".py", ".toml"}]
    assert not [file for file in read if machine.search(file.read_text())]


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("shape.sizes", "from fxopt.patterns.core import Reject"),
        ("shape.sizes", "def f():\n    import fxopt.patterns"),
        ("patterns.pooling", "from fxopt.kernels.columns.op import columns"),
        ("kernels.columns.op", "from fxopt.capture import Capture"),
        ("runtime.module", "from fxopt import optimize"),
        ("runtime.module", "import fxopt\nfxopt.report(model)"),
        ("runtime.module", "from fxopt import Config"),
    ],
)
def test_upward_imports_are_seen(name: str, source: str) -> None:
    assert upward_imports(name, source)


def test_allowed_imports_are_allowed() -> None:
    source = "from fxopt.kernels.columns.plan import Plan\nif TYPE_CHECKING:\n    from fxopt.optimize import optimize"
    assert not upward_imports("patterns.pooling", source)


def test_edits_are_seen() -> None:
    assert edits("patterns.pooling", "def f(graph, node):\n    graph.erase_node(node)")


def test_tensors_without_a_device_are_seen() -> None:
    assert deviceless("verify.made", "import torch\nx = torch.rand(3)")
    assert not deviceless("verify.made", "import torch\nx = torch.rand(3, device='cpu')")
