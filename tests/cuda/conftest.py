"""The shim library of the tree's own sources, built once."""

from __future__ import annotations

import pytest
import torch

from fxopt.kernels.columns import programs
from fxopt.kernels.columns.plan import Op
from tests.cuda import mutants
from tests.cuda.shim_library import Shim, compile_shim


@pytest.fixture(scope="session")
def shim(tmp_path_factory) -> Shim:
    return Shim(compile_shim(tmp_path_factory.mktemp("shim")))


@pytest.fixture(scope="session")
def mutant(tmp_path_factory) -> Shim:
    """The same with every planted bug asleep."""
    return mutants.build(tmp_path_factory.mktemp("mutant"))


@pytest.fixture(scope="session")
def staged_mutant(tmp_path_factory) -> Shim:
    """That with narrow rows staged."""
    return mutants.build(tmp_path_factory.mktemp("staged_mutant"), "-DFXOPT_STAGED")


@pytest.fixture
def divides_as_cuda(monkeypatch):
    """The reference divides by a number as torch does on CUDA: by the product with its reciprocal."""

    def divide(v, a):
        wide = v.double() if v.dtype == torch.float64 else v.float()
        return (wide * (1 / torch.tensor(a, dtype=torch.float64)).to(wide.dtype)).to(v.dtype)

    monkeypatch.setitem(programs._BINARY, Op.DIV, divide)
