"""Packages for a GPU: the bundle's kernels serve them in C++ and by fxopt.load."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

import fxopt
from fxopt.export import bundle
from fxopt.kernels.cuda_build import arch_on
from tests.export.conftest import ROWS, Small, check_served, inputs, ran

pytestmark = pytest.mark.gpu
KEEPS_TEXTS = torch.__version__ >= (2, 13)  # older ones print what a kernel says, and raise something of their own


@pytest.fixture(scope="module")
def model() -> Small:
    torch.manual_seed(0)
    return Small().cuda().eval()


@pytest.fixture(scope="module")
def package(model: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    program = fxopt.export(model, tuple(value.cuda() for value in inputs(37)))
    assert torch.ops.fxopt.columns.default in [node.target for node in program.graph.nodes]
    return Path(fxopt.export.package(program, folder / "model.pt2"))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    bundle.write(folder, [arch_on(0)])
    return folder / bundle.FRONT


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
@torch.no_grad()
def test_a_package_answers_in_cpp_and_names_bad_ids(library: Path, package: Path, model: Small, tmp_path: Path) -> None:
    check_served(library, package, model, tmp_path)


_LOADED = """
import sys, torch, fxopt
kernels, package, calls, answers = sys.argv[1:]
model, calls = fxopt.load(package, kernels), torch.load(calls)
torch.save([model(*call) for call in calls], answers)
dense, ids = calls[0]
for wrong in (ids + 50, ids), (ids.cpu(),):
    try:
        for each in wrong:
            model(dense, each)
            torch.cuda.synchronize()
    except (TypeError, IndexError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}")
"""


@torch.no_grad()
def test_a_package_answers_where_fxopt_loads_it(library: Path, package: Path, model: Small, tmp_path: Path) -> None:
    calls = [tuple(value.cuda() for value in inputs(batch)) for batch in (1, 0, 3, 200)]
    torch.save(calls, tmp_path / "calls.pt")
    printed = ran(
        sys.executable, "-c", _LOADED, library.parent, package, tmp_path / "calls.pt", tmp_path / "answers.pt"
    )
    for call, answer in zip(calls, torch.load(tmp_path / "answers.pt"), strict=True):
        torch.testing.assert_close(answer, model(*call))
    bad, elsewhere = printed.splitlines()
    if KEEPS_TEXTS:
        assert bad.startswith("IndexError:") and f"is outside table 'tables.0.weight' with {ROWS} rows" in bad
    else:
        assert bad.startswith("RuntimeError:")
    assert (
        elsewhere == "TypeError: input ids: expected int64 on cuda of 2 dimensions, found int64 on cpu of 2 dimensions"
    )
