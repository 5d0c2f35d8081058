"""compute-sanitizer's command: what it would miss, and what it says of a bug."""

from __future__ import annotations

import ast
import re

import pytest

from tests.cuda import sanitize


def test_every_kernel_has_a_test():
    """A new one needs a line in KERNELS."""
    files = [*(sanitize.ROOT / "fxopt").rglob("*.cu*"), sanitize.ROOT / "fxopt/kernels/pointwise/cuda/source.py"]
    sources = [path.read_text() for path in files]
    kernels = [name for text in sources for name in re.findall(r"__global__[^;{]*?\b(\w+_kernel)\(", text)]
    assert len(kernels) == sum(text.count("__global__") for text in sources), "a kernel's name ends in _kernel"
    assert set(kernels) == set(sanitize.KERNELS)


@pytest.mark.parametrize("test", sorted({*sanitize.KERNELS.values(), *sanitize.MORE}))
def test_every_test_is_there_and_needs_a_gpu(test):
    file, name = test.split("::")
    module = ast.parse((sanitize.ROOT / "tests/cuda" / file).read_text())
    (found,) = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name)
    marks = [ast.unparse(node) for node in (*found.decorator_list, *module.body)]
    assert any(mark in ("pytest.mark.gpu", "pytestmark = pytest.mark.gpu") for mark in marks)


@pytest.mark.parametrize("mutant", sanitize.MUTANTS, ids=lambda mutant: mutant.tool)
def test_a_mutants_source_is_there(mutant):
    assert (sanitize.ROOT / "fxopt/kernels" / mutant.file).read_text().count(mutant.old) == 1


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("mutant", sanitize.MUTANTS, ids=lambda mutant: mutant.tool)
def test_planted_bugs_are_reported(mutant):
    told = sanitize.planted(mutant)
    assert told.reported, told.text
