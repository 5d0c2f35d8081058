"""Small models to export, and processes that know nothing of fxopt."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fxopt.export import bundle

ROWS = 50
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "serve_cpp"


class Small(nn.Module):
    """Columns of two kinds, their interaction, and a tower: what most models have. ids [B, 4], dense [B, 3]."""

    def __init__(self, features: int = 4, dim: int = 8) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(ROWS, dim, mode="sum") for _ in range(features)])
        self.bottom = nn.Sequential(nn.Linear(3, dim), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(dim + 15 * (features == 4), 16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))
        i, j = torch.triu_indices(features + 1, features + 1, 0)
        self.register_buffer("i", i, persistent=False)
        self.register_buffer("j", j, persistent=False)

    def forward(self, dense: Tensor, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, *(t(ids[:, k : k + 1]) for k, t in enumerate(self.tables))], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.i, self.j]
        score = self.top(torch.cat([bottom, products], 1)) * self.scale[0]
        return torch.sigmoid(score), {"products": products}


def inputs(batch: int, features: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3), torch.randint(0, ROWS, (batch, features))


def called(program: torch.export.ExportedProgram) -> set[str]:
    graphs = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    return {str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    bundle.write(folder)
    return folder / bundle.FRONT


def ran(*command: object) -> str:
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def check_served(library: Path, package: Path, model: Small, folder: Path) -> None:
    """The example in C++ gives the model's answers to mixed batches, and names a bad id."""
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    ran("cmake", "-S", EXAMPLE, "-B", folder / "build", prefix, "-DCMAKE_BUILD_TYPE=None")
    ran("cmake", "--build", folder / "build")

    requests = [list(inputs(batch)) for batch in (1, 3, 3, 200)]
    requests[2][1][1, 3] = ROWS
    torch.save(requests, folder / "requests.pt")
    printed = ran(folder / "build" / "serve", library, package, folder / "requests.pt", folder / "answers.pt")
    for number, (request, answer) in enumerate(zip(requests, torch.load(folder / "answers.pt"), strict=True)):
        if number == 2:
            assert answer == ()
            continue
        score, products = model(*(tensor.to(model.scale.device) for tensor in request))
        torch.testing.assert_close(answer, (score.cpu(), products["products"].cpu()))
    assert f"id {ROWS} at row 1 is outside table 'tables.3.weight' with {ROWS} rows" in printed
    assert re.findall(r"batch (\d+): [\d.]+ us", printed) == ["1", "3", "200"]


def run_elsewhere(script: str, *arguments: object) -> str:
    """What a script prints in a process of its own, where fxopt cannot be imported."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": "", "CXX": "no-compiler"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd="/")
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
