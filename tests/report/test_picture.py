"""Graphs in blocks, and what their operators move and compute."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from fxopt.config import Config
from fxopt.optimize import optimize
from fxopt.report import report, turns
from fxopt.report.data import Block, SignatureReport
from fxopt.report.kinds import COLUMNS, MLP

B, F, D, R = 6, 40, 8, 50


class Columns(nn.Module):
    """40 columns in two forms, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(R, D) for _ in range(F))
        self.bags = nn.ModuleList(nn.EmbeddingBag(R, D, mode="sum") for _ in range(2))
        self.top = nn.Sequential(nn.Linear((F + 2) * D, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor, many: Tensor) -> Tensor:
        rows = [table(ids[:, i] % R) for i, table in enumerate(self.tables)]
        return self.top(torch.cat([*rows, *(bag(many) for bag in self.bags)], dim=1))


@pytest.fixture(scope="module")
def found() -> SignatureReport:
    """Without trials: where one is won above some number of rows only, both ways are one node, and so one step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turns, "SECONDS", 0.02)
        patch.setattr(turns.Turns, "distrust", "")
        inputs = torch.randint(0, 1000, (B, F)), torch.randint(0, R, (B, 3))
        (signature,) = report(optimize(Columns().eval(), config=Config(tune="off")), {B: inputs}).signatures
    return signature


def having(blocks: tuple[Block, ...], step: str) -> Block:
    (block,) = [block for block in blocks if any(each.startswith(step) for each in block.steps)]
    return block


def test_columns_that_look_alike_are_one_block(found: SignatureReport) -> None:
    block = having(found.before, "embedding f32[B, 8]")
    assert block.kind == COLUMNS and len(block.parts) == F
    assert [step.split()[0] for step in block.steps][-2:] == ["remainder", "embedding"]
    modules = {module for module, _ in block.parts}
    lines = {line.partition(":")[0] for _, line in block.parts}
    assert lines == {"test_picture.py"} and len(modules) in (1, F)


def test_a_chain_of_layers_is_one_part(found: SignatureReport) -> None:
    block = having(found.before, "linear")
    assert block.kind == MLP and len(block.parts) == 1
    assert [step.split()[0] for step in block.steps] == ["linear", "relu", "linear"]


@pytest.mark.parametrize("side", ["before", "after"])
def test_blocks_come_behind_what_they_read(found: SignatureReport, side: str) -> None:
    blocks: tuple[Block, ...] = getattr(found, side)
    assert all(read < number for number, block in enumerate(blocks) for read in block.reads)
    assert [block for one, block in pairwise(blocks) if block.reads]  # something reads something


def test_every_operator_is_in_one_block(found: SignatureReport) -> None:
    for blocks, operators in ((found.before, found.operators_before), (found.after, found.operators_after)):
        assert sum(len(block.steps) * len(block.parts) for block in blocks) >= operators


def test_bytes_and_operations(found: SignatureReport) -> None:
    layers = 2 * B * ((F + 2) * D * 32 + 32)
    assert having(found.before, "linear").operations == {B: layers}
    assert sum(block.operations[B] for block in found.after) == layers
    bags = having(found.before, "embedding_bag")
    rows = 2 * B * 3 * D * 4  # bytes of the rows that both bags read; their tables have more
    assert rows <= bags.bytes[B] < rows + 2 * (B * D * 4 + 2000)
    after = having(found.after, "columns")
    written = B * (F + 2) * D * 4
    assert after.bytes[B] >= rows + written + B * F * D * 4


def test_the_lines_of_the_model_are_there() -> None:
    with torch.no_grad():
        fast = optimize(Columns().eval())
        fast(torch.randint(0, 1000, (B, F)), torch.randint(0, R, (B, 3)))
    made = report(fast)
    places = {line for block in made.signatures[0].before for _, line in block.parts if line}
    assert places and places <= made.sources.keys()
    assert any("> " in text and "table(ids[:, i] % R)" in text for text in made.sources.values())
    assert all(not block.seconds for block in made.signatures[0].before)  # nothing was measured
