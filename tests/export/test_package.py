"""Packages, from the command line to answers: in C++ (examples/serve_cpp), and by fxopt.load in Python."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt import packages
from fxopt.cli import main
from fxopt.export import ExportError, bundle
from fxopt.export.package import described
from fxopt.kernels import cuda_build
from fxopt.packages import Input, Inputs, Package, Size
from tests.export.conftest import ROWS, Small, check_served, inputs, ran, run_elsewhere

_MODEL = """
import torch
from tests.export.conftest import Small, inputs as example_inputs

def build_model():
    torch.manual_seed(0)
    return Small()
"""

pytestmark = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of Small with the seed 0."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "model.py").write_text(_MODEL)
    assert main(["export", str(folder / "model.py"), "-o", str(folder / "model.pt2"), "--package"]) == 0
    return folder / "model.pt2"


def original() -> Small:
    torch.manual_seed(0)
    return Small().eval()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
@torch.no_grad()
def test_a_package_answers_mixed_batches_and_names_bad_ids(library: Path, package: Path, tmp_path: Path) -> None:
    check_served(library, package, original(), tmp_path)


_LOADED = """
import sys, torch, fxopt
kernels, package, calls, answers = sys.argv[1:]
model = fxopt.load(package, kernels)
torch.save([model(*call) for call in torch.load(calls)], answers)
dense, ids = torch.load(calls)[3]
for wrong in (dense, ids.int()), (dense[:7], ids), (dense, ids[:, :3]), (dense, ids + 50), (dense, [ids]), (dense,):
    try:
        model(*wrong)
    except (TypeError, ValueError, IndexError) as error:
        print(f"{type(error).__name__}: {error}")
slow = {"sympy", "torch._dynamo", "torch._inductor", "fxopt.optimize"}
print("imported:", slow & set(sys.modules))
"""


@pytest.mark.slow
@torch.no_grad()
def test_a_process_that_loads_a_package_imports_little_and_checks_its_inputs(
    library: Path, package: Path, tmp_path: Path
) -> None:
    calls = [inputs(batch) for batch in (0, 1, 3, 200)]
    torch.save([*calls, tuple(value.t().contiguous().t() for value in calls[2])], tmp_path / "calls.pt")
    printed = ran(
        sys.executable, "-c", _LOADED, library.parent, package, tmp_path / "calls.pt", tmp_path / "answers.pt"
    )
    model = original()
    for call, answer in zip([*calls, calls[2]], torch.load(tmp_path / "answers.pt"), strict=True):
        torch.testing.assert_close(answer, model(*call))
    said = printed.splitlines()
    assert said[:3] == [
        "TypeError: input ids: expected int64 on cpu of 2 dimensions, found int32 on cpu of 2 dimensions",
        "ValueError: input ids, dimension 0: expected 7, found 200",
        "ValueError: input ids, dimension 1: expected the size 4, found 3",
    ]
    assert re.match(rf"IndexError: .*: id \d+ at row 0 is outside table 'tables.\d.weight' with {ROWS} rows", said[3])
    assert said[4] == "TypeError: input ids: expected int64 on cpu of 2 dimensions, found list"
    assert said[5].startswith("TypeError: expected the arguments of the export:")
    assert said[6] == "imported: set()"


_OPENED = """
import ctypes, sys, torch
torch.ops.load_library(sys.argv[1])
print(torch._C._dispatch_has_kernel_for_dispatch_key("fxopt::columns", "CUDA"))
print(ctypes.CDLL(None).fxopt_columns_failed(0, ctypes.create_string_buffer(1024)))
"""


def test_a_bundle_for_gpus_has_a_kernel_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "compiled").write_text("by nvcc")
    monkeypatch.setattr(cuda_build, "build", lambda library, arch: tmp_path / "compiled")
    written = {path.name for path in bundle.write(tmp_path / "kernels", ["sm_80", "sm_90a"])}
    assert {f"fxopt_columns_cuda-{arch}.so" for arch in ("sm_80", "sm_90a")} <= written
    assert json.loads((tmp_path / "kernels" / bundle.MANIFEST).read_text())["archs"] == ["sm_80", "sm_90a"]
    assert run_elsewhere(_OPENED, tmp_path / "kernels" / bundle.FRONT).split() == ["True", "0"]


BAG = Inputs(
    [
        Input("ids", None, "int64", "cpu", [Size("n", 1, 0)]),
        Input("offsets", None, "int64", "cpu", [Size("b", 1, 1)]),
        Input("pairs", None, "float32", "cpu", [Size("b", 2, 0), 3]),
        Input("mode", value="sum"),
    ],
    {"n": (0, None), "b": (2, 100)},
)


class Nibbles(Tensor):
    pass


class Opened:
    """What Package opens, without a file."""

    notes: ClassVar = {packages.NOTE: BAG.text()}


def bag(offsets: int = 6, pairs: int = 10, mode: object = "sum") -> list[object]:
    return [torch.zeros(9).long(), torch.zeros(offsets).long(), torch.zeros(pairs, 3), mode]


@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        (bag(pairs=11), "input pairs, dimension 0: expected 10, found 11"),
        (bag(pairs=8), "input pairs, dimension 0: expected 10, found 8"),
        (bag(2, 2), "input offsets, dimension 0: expected at least 3 and at most 101, found 2"),
        (bag(102, 202), "input offsets, dimension 0: expected at least 3 and at most 101, found 102"),
        (bag(mode="mean"), "input mode: expected 'sum', found 'mean'"),
    ],
)
def test_sizes_that_do_not_belong_together_are_named(leaves: list, said: str) -> None:
    inputs = Inputs.of(BAG.text())
    assert inputs.text() == BAG.text() and inputs.leaves == BAG.leaves
    inputs.check(bag())
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        inputs.check(leaves)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, 4, mode="sum", include_last_offset=True)

    def forward(self, ids: Tensor, offsets: Tensor, x: Tensor, scale: float) -> Tensor:
        return self.bag(ids, offsets) * scale + x


def test_a_package_notes_what_belongs_together() -> None:
    program = fxopt.export(Bag().eval(), (torch.arange(9), torch.tensor([0, 2, 9]), torch.randn(2, 4), 0.5))
    inputs = Inputs.of(described(program).text())
    inputs.check((torch.arange(5), torch.tensor([0, 0, 1, 5]), torch.randn(3, 4), 0.5))
    with pytest.raises(ValueError, match="input x, dimension 0: expected 3, found 2"):
        inputs.check((torch.arange(5), torch.tensor([0, 0, 1, 5]), torch.randn(2, 4), 0.5))
    with pytest.raises(TypeError, match=r"input scale: expected 0\.5, found 0\.25"):
        inputs.check((torch.arange(5), torch.tensor([0, 0, 1, 5]), torch.randn(3, 4), 0.25))


def test_symbols_are_told_by_their_inputs() -> None:
    assert BAG.legend("Eq(n, 3*b)") == "n is dimension 0 of input ids"
    assert described(fxopt.export(nn.Linear(2, 2).eval(), (torch.rand(3, 2),))).legend("nothing") == ""


@pytest.mark.parametrize("ids", [torch.zeros(9).long().to_sparse(), torch.zeros(9).long().as_subclass(Nibbles)])
def test_inputs_of_another_kind_are_refused(ids: Tensor) -> None:
    with pytest.raises(
        TypeError, match=r"input ids: expected int64 on cpu of 1 dimensions, found (Tensor|Nibbles), torch"
    ):
        BAG.check([ids, *bag()[1:]])


def test_a_bad_id_is_told_with_names_that_hold_apostrophes() -> None:
    text = "fxopt-bad-id column=0 row=3 lane=0 value=7 rows=5 name='column 0 (u's)' table='u's.weight'"
    told = Package(Opened())._explained(RuntimeError(text))
    assert str(told) == "column 0 (u's): id 7 at row 3 is outside table \"u's.weight\" with 5 rows"


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * self.count


def test_a_program_that_writes_buffers_is_no_package(tmp_path: Path) -> None:
    program = fxopt.export(Counting().eval(), (torch.rand(3),))
    with pytest.raises(ExportError, match="a package keeps no buffers, and this program writes count"):
        fxopt.export.package(program, tmp_path / "counting.pt2")


def test_kernels_of_another_torch_are_refused(tmp_path: Path) -> None:
    (tmp_path / packages.MANIFEST).write_text('{"torch": "1.0", "machine": "x"}')
    with pytest.raises(ValueError, match=r"expected kernels for torch .*, found 1\.0"):
        fxopt.load(tmp_path / packages.MANIFEST, tmp_path)


def test_files_that_are_no_packages_are_refused(library: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no package at"):
        fxopt.load(tmp_path / "model.pt2", library.parent)
    (tmp_path / "model.pt2").write_text("nothing")
    with pytest.raises(ValueError, match=r"expected a package of fxopt\.export\.package"):
        fxopt.load(tmp_path / "model.pt2", library.parent)
