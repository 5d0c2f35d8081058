"""examples/serve_cpp, from the command line to answers in C++."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fxopt.cli import main
from tests.export.conftest import ROWS, Small, inputs

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "serve_cpp"
_MODEL = """
import torch
from tests.export.conftest import Small, inputs as example_inputs

def build_model():
    torch.manual_seed(0)
    return Small()
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake"),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="needs a C++ compiler"),
]


def ran(*command: object) -> str:
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@torch.no_grad()
def test_a_package_answers_mixed_batches_and_names_bad_ids(library: Path, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(_MODEL)
    package = tmp_path / "model.pt2"
    assert main(["export", str(tmp_path / "model.py"), "-o", str(package), "--package"]) == 0
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    ran("cmake", "-S", EXAMPLE, "-B", tmp_path / "build", prefix, "-DCMAKE_BUILD_TYPE=None")
    ran("cmake", "--build", tmp_path / "build")

    requests = [list(inputs(batch)) for batch in (1, 3, 3, 200)]
    requests[2][1][1, 3] = ROWS
    torch.save(requests, tmp_path / "requests.pt")
    paths = (tmp_path / name for name in ("model.pt2", "requests.pt", "answers.pt"))
    printed = ran(tmp_path / "build" / "serve", library, *paths)

    torch.manual_seed(0)
    model = Small().eval()
    for number, (request, answer) in enumerate(zip(requests, torch.load(tmp_path / "answers.pt"), strict=True)):
        if number == 2:
            assert answer == ()
            continue
        score, products = model(*request)
        torch.testing.assert_close(answer, (score, products["products"]))
    assert f"id {ROWS} at row 1 is outside table 'tables.3.weight' with {ROWS} rows" in printed
    assert re.findall(r"batch (\d+): [\d.]+ us", printed) == ["1", "3", "200"]
