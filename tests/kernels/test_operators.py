"""The table of docs/kernels/operators.md says what the operators themselves tell, and what they lack."""

from __future__ import annotations

import ctypes
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fxopt import kernels
from fxopt.kernels.libraries import CUDA_LIBRARIES
from fxopt.kernels.operators import Operators

PAGE = Path(__file__).resolve().parents[2] / "docs/kernels/operators.md"
PARTS = re.compile(
    "_(backward|kernel|in_pytorch|row_gradients|entries)$|^columns_dots$"
)  # what an operator consists of is none of its own


def groups() -> list[Operators]:
    modules = (
        importlib.import_module(found.name) for found in pkgutil.walk_packages(kernels.__path__, "fxopt.kernels.")
    )
    found = {id(value): value for module in modules for value in vars(module).values() if isinstance(value, Operators)}
    return list(found.values())


def operators() -> Iterator[tuple[str, Path | None]]:
    """Every operator of ours, and the library for the CPU that it may have a kernel in."""
    for group in groups():
        group.compiled()
        for operator in group._operators:
            if not PARTS.search(name := operator.schema.partition("(")[0]):
                yield name, group._path


def registered(name: str, *keys: str) -> bool:
    defined = hasattr(torch.ops.fxopt, name)
    return defined and any(torch._C._dispatch_has_kernel_for_dispatch_key(f"fxopt::{name}", key) for key in keys)


def forward(name: str, library: Path | None) -> str:
    """Of the CPU: registered with the dispatcher, or only the way past it."""
    past = library is not None and hasattr(ctypes.CDLL(str(library)), f"fxopt_{name}_run")
    return "C++" if past or registered(name, "CPU") else "PyTorch"


def backward(name: str) -> str:
    if registered(f"{name}_backward", "CPU"):
        return "C++"
    return "PyTorch" if registered(name, "Autograd", "CompositeImplicitAutograd") else "none"


@pytest.fixture(scope="module")
def table() -> dict[str, list[str]]:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: rest.split(" | ") for name, rest in rows}


def test_every_operator_has_its_line_and_what_it_tells(table: dict[str, list[str]]) -> None:
    found = {name: [forward(name, library), backward(name)] for name, library in operators()}
    assert {name: cells[:2] for name, cells in table.items()} == found


def test_every_kernel_for_gpus_is_somewhere(table: dict[str, list[str]]) -> None:
    sources = {library.source.name for library in CUDA_LIBRARIES} - {"stage.cu"}  # inputs of graphs, no operator
    assert {name for cells in table.values() for name in re.findall(r"`(\w+\.cu)`", cells[2])} == sources


def test_gradients_on_a_gpu_are_those_of_pytorch_where_it_has_no_kernel(table: dict[str, list[str]]) -> None:
    for name, (_, cpu, _, cuda, _) in table.items():
        assert (cuda == "none") == (cpu == "none") and (cuda in ("none", "PyTorch") or "`" in cuda), name


if __name__ == "__main__":  # the table's first cells, for a new operator
    for name, library in operators():
        print(f"| `{name}` | {forward(name, library)} | {backward(name)} |")
