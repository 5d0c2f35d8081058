"""Programs: the optimized model's answers at all sizes, under the model's names, and what they refuse."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxopt
from fxopt.export import ExportError
from tests.export.conftest import ROWS, Small, called, inputs, run_elsewhere

_ELSEWHERE = """
import sys, torch
library, program, calls, answers = sys.argv[1:]
torch.ops.load_library(library)
run = torch.export.load(program).module()
with torch.no_grad():
    torch.save([run(*call) for call in torch.load(calls)], answers)
assert not any(name.startswith("fxopt") for name in sys.modules)
"""


@torch.no_grad()
def test_a_program_gives_the_models_answers_in_a_process_without_fxopt(library: Path, tmp_path: Path) -> None:
    model = Small().eval()
    program = fxopt.export(model, inputs(1))
    assert {"fxopt.columns.default", "fxopt.mlp.default"} <= called(program)
    assert program.state_dict.keys() == model.state_dict().keys()
    torch.export.save(program, tmp_path / "model.pt2")
    calls = [inputs(batch) for batch in (0, 1, 3, 200)]
    torch.save(calls, tmp_path / "calls.pt")
    run_elsewhere(_ELSEWHERE, library, tmp_path / "model.pt2", tmp_path / "calls.pt", tmp_path / "answers.pt")
    for call, answer in zip(calls, torch.load(tmp_path / "answers.pt"), strict=True):
        torch.testing.assert_close(answer, model(*call))


class Mixed(nn.Module):
    """Gates and experts over a pointwise chain, and products of looked-up rows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.gate = nn.Linear(8, 3)
        self.tables = nn.ModuleList([nn.Embedding(ROWS, 8) for _ in range(12)])

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x) * torch.sigmoid(x + 1) - x.square().mean(1, keepdim=True)
        weights = self.gate(y).softmax(-1).unsqueeze(1)
        experts = torch.stack([expert(y).relu() for expert in self.experts], 1)
        rows = [table(ids[:, k % 4]) for k, table in enumerate(self.tables)]
        return (weights @ experts).squeeze(1), torch.cat([rows[k] * rows[k + 6] for k in range(6)], 1)


@torch.no_grad()
def test_operators_with_a_plan_stay_calls(library: Path, tmp_path: Path) -> None:
    model = Mixed().eval()
    example = torch.randn(5, 8), torch.randint(0, ROWS, (5, 4))
    program = fxopt.export(model, example, config=fxopt.Config(tune="off"))
    assert {f"fxopt.{name}.default" for name in ("pointwise", "towers", "lookup_products")} <= called(program)
    torch.export.save(program, tmp_path / "model.pt2")
    calls = [(torch.randn(batch, 8), torch.randint(0, ROWS, (batch, 4))) for batch in (0, 1, 3, 200)]
    torch.save(calls, tmp_path / "calls.pt")
    run_elsewhere(_ELSEWHERE, library, tmp_path / "model.pt2", tmp_path / "calls.pt", tmp_path / "answers.pt")
    for call, answer in zip(calls, torch.load(tmp_path / "answers.pt"), strict=True):
        torch.testing.assert_close(answer, model(*call))
    calls[2][1][1, 2] = ROWS
    with pytest.raises(RuntimeError, match=r"row=1 .*value=50 rows=50 .*table='tables\.\d+\.weight'"):
        program.module()(*calls[2])


@torch.no_grad()
def test_an_optimized_model_is_exported_as_it_was_configured() -> None:
    model = Small().eval()
    fast = fxopt.optimize(model, config=fxopt.Config(disable=("linear_chains",)))
    assert "fxopt.mlp.default" not in called(fxopt.export(fast, inputs(5)))
    program = fxopt.export(fast, inputs(5), dynamic=False)
    call = inputs(5)
    torch.testing.assert_close(program.module()(*call), model(*call))
    with pytest.raises(AssertionError):
        program.module()(*inputs(6))


@torch.no_grad()
def test_arguments_keep_their_names() -> None:
    model = Small().eval()
    dense, ids = inputs(4)
    program = fxopt.export(model, {"ids": ids, "dense": dense}).module()
    dense, ids = inputs(1)
    torch.testing.assert_close(program(ids=ids, dense=dense), model(dense, ids))


@torch.no_grad()
def test_a_bad_id_is_named_by_column_table_and_row() -> None:
    model = Small().eval()
    program = fxopt.export(model, inputs(4)).module()
    dense, ids = inputs(3)
    ids[2, 1] = ROWS
    with pytest.raises(RuntimeError, match=r"row=2 .*value=50 rows=50 .*tables\.1.* table='tables\.1\.weight'"):
        program(dense, ids)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] % 2:
            return x.relu() + 1
        return x.view(2, -1).relu()


@torch.no_grad()
def test_what_the_graph_takes_for_granted_about_sizes_the_program_demands() -> None:
    program = fxopt.export(Halves(), (torch.randn(6, 4),)).module()
    x = torch.randn(10, 4)
    torch.testing.assert_close(program(x), Halves()(x))
    with pytest.raises(Exception, match="assert"):
        program(torch.randn(5, 4))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4)

    def forward(self, ids: Tensor) -> Tensor:
        pooled = torch.max_pool1d(self.table(ids).transpose(1, 2), ids.shape[1]).squeeze(2)
        return pooled / math.sqrt(ids.shape[1])


@torch.no_grad()
def test_a_size_that_a_call_takes_for_a_number_is_the_examples_in_a_program() -> None:
    model = Scaled().eval()
    program = fxopt.export(model, (torch.randint(0, 20, (5, 6)),)).module()
    for batch in (1, 5, 8):
        ids = torch.randint(0, 20, (batch, 6))
        torch.testing.assert_close(program(ids), model(ids))
    for length in (5, 7):
        with pytest.raises(AssertionError, match="Guard failed"):
            program(torch.randint(0, 20, (5, length)))


class Squeezed(nn.Module):
    """Its squeeze gives another rank at batch 1, and yet the same answer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.layer(x.unsqueeze(1).squeeze())).reshape(-1, 1)


@torch.no_grad()
def test_one_row_is_served_where_a_squeeze_does_not_matter() -> None:
    model = Squeezed().eval()
    program = fxopt.export(model, (torch.randn(6, 4),)).module()
    for batch in (1, 2, 9):
        x = torch.randn(batch, 4)
        torch.testing.assert_close(program(x), model(x))


class Conditional(nn.Module):
    """Its inner module asks for values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Asking()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.inner(x))


class Asking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class Edited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.layer(x)
        return self.kept.relu()


def test_a_part_that_stays_pythons_is_refused_with_its_place() -> None:
    with pytest.raises(ExportError, match=r"inner at test_program\.py:\d+.*data.*torch\.where"):
        fxopt.export(Conditional(), (torch.randn(3, 4),))


class Packed(nn.Module):
    """What DIEN does: a number of steps that the longest history decides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=x.shape[1])[0]


def test_packed_sequences_are_refused_as_torch_has_no_program_for_them() -> None:
    """Should torch learn it, this fails: fxopt.export could then hold such layers."""
    example = torch.randn(3, 5, 4), torch.tensor([2, 5, 1])
    with warnings.catch_warnings(), pytest.raises(TypeError, match="FakeTensor"):
        warnings.simplefilter("ignore")
        torch.export.export(Packed(), example, strict=False)
    with pytest.raises(ExportError, match=r"test_program\.py:\d+: torch.export has no program for packed sequences"):
        fxopt.export(Packed().eval(), example)


def test_hooks_around_the_model_are_refused() -> None:
    model = Small().eval()
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(ExportError, match="hooks run around its forward"):
        fxopt.export(model, inputs(3))


def test_one_tensor_for_two_inputs_is_refused() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x * 2 + y

    x = torch.randn(3, 4)
    with pytest.raises(ExportError, match=r"args\[1\] is the same object as args\[0\]"):
        fxopt.export(Two(), (x, x))


def test_compressed_weights_are_refused() -> None:
    with pytest.raises(ExportError, match="compressed weights"):
        fxopt.export(Small().eval(), inputs(3), config=fxopt.Config(precision="bf16"))


@torch.no_grad()
def test_an_attribute_that_a_forward_assigns_is_left_out_with_a_warning() -> None:
    model = Edited().eval()
    with pytest.warns(UserWarning, match=r"does not set the model\.kept"):
        program = fxopt.export(model, (torch.randn(3, 4),))
    x = torch.randn(7, 4)
    torch.testing.assert_close(program.module()(x), model(x))
    assert model.kept is not None  # the model's own call


def test_quantized_collections_keep_their_sizes_apart() -> None:
    torchrec = pytest.importorskip("torchrec")
    quantize = pytest.importorskip("torchrec.inference.modules").quantize_embeddings

    class Collected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = torchrec.EmbeddingBagConfig
            tables = [config(name=k, embedding_dim=8, num_embeddings=ROWS, feature_names=[k, k * 2]) for k in "ab"]
            collection = nn.Sequential(torchrec.EmbeddingBagCollection(tables=tables))
            self.collection, self.dense = quantize(collection, torch.qint8, inplace=False)[0], nn.Linear(3, 32)

        def forward(self, features: Any, x: Tensor) -> Tensor:
            return torch.sin(self.collection(features).values()) + self.dense(x)

    def features(batch: int) -> Any:
        lengths = torch.ones(4 * batch).long()
        lengths[0] += 5  # a number of ids that no other size is
        ids = torch.randint(0, ROWS, (int(lengths.sum()),))
        return torchrec.KeyedJaggedTensor(["a", "aa", "b", "bb"], ids, lengths=lengths)

    model = Collected().eval()
    with torch.no_grad():
        program = fxopt.export(model, (features(7), torch.randn(7, 3)))
        assert "fxopt.table_batched.default" in called(program)
        for batch in (1, 5, 32, 40):
            given = features(batch)
            again = torchrec.KeyedJaggedTensor(given.keys(), given.values(), lengths=given.lengths())
            x = torch.randn(batch, 3)
            torch.testing.assert_close(program.module()(again, x), model(given, x))
    (node,) = (n for n in program.graph.nodes if "table_batched" in str(n.target))
    assert node.meta["val"].shape[1] == 32
