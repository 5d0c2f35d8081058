"""Large batches some rows at a time: the same answers, at every size, and nothing where rows mix."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from fxopt.capture import capture
from fxopt.rewrites import row_chunks
from fxopt.rewrites.framework.core import Fuel, apply
from fxopt.rewrites.row_chunks import ROWS
from fxopt.tune.tuner import Tuner, Verdict
from tests.rewrites.test_catalogue import applied

CONFIG = fxopt.Config(tune="off", disable=("pointwise",))
aten, _SIZE = torch.ops.aten, torch.ops.aten.sym_size.int
SIZES = (0, 1, 5, 2 * ROWS, 2 * ROWS + 1, 3 * ROWS, 5 * ROWS - 1)


class Interactions(nn.Module):
    """Fields of which every second product is taken; the mean over the batch comes last."""

    centred = False

    def __init__(self) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(50, 8), nn.Linear(64 + 8, 3)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        rows = self.table(ids)
        squares = torch.bmm(rows, rows.transpose(1, 2)).softmax(2).flatten(1).tanh()
        scores = self.top(torch.cat([squares, dense.expand(-1, 8)], 1)).sigmoid() * dense.exp()
        return scores - scores.mean(0) if self.centred else scores


class Centred(Interactions):
    centred = True


class LayerLast(Interactions):
    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        squares = torch.bmm(self.table(ids), self.table(ids).transpose(1, 2)).softmax(2).flatten(1).tanh()
        return self.top(torch.cat([squares, dense.expand(-1, 8)], 1)).sigmoid()


class AllRows(Interactions):
    """The products are of all rows: what is before them is too little."""

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        return dense @ dense.T


class Sized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.sin()
        return ((wide / wide.shape[1]).cos().exp() @ self.weight).sigmoid()


def inputs(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 50, (batch, 8)), torch.randn(batch, 1)


@pytest.mark.parametrize("kind", [Interactions, Centred])
def test_the_same_at_every_size(kind: type[nn.Module]) -> None:
    model = kind().eval()
    with torch.no_grad():
        fast = fxopt.optimize(model, inputs(6), CONFIG)
        (ran,) = (ran for ran in fast._fxopt.findings[0].passes if ran.name == "row_chunks")
        assert ran.changes and not ran.misses  # of what it has made itself it says nothing
        for batch in SIZES:
            arguments = inputs(batch)
            torch.testing.assert_close(fast(*arguments), model(*arguments), equal_nan=True)
        assert len(fast._fxopt.entries) == 1


class Sequences(nn.Module):
    """Rows of any length, flattened and back; a row of the lookup is a step of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(50, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        steps = self.table(ids)
        flat = self.layer(steps.flatten(0, 1)).tanh().view(ids.shape[0], -1, 8)
        return (flat * steps).cumsum(1).sum(1).sigmoid() + dense.exp()


class Crossed(Sequences):
    """The steps stand in front: flattened, the rows of one batch row lie apart."""

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        steps = self.layer(self.table(ids.t()).flatten(0, 1)).tanh().view(ids.shape[1], -1, 8)
        return steps.cumsum(0).sum(0).sigmoid() + dense.exp()


@pytest.mark.parametrize("kind", [Sequences, Crossed])
def test_sequences_of_any_length(kind: type[nn.Module]) -> None:
    model = kind().eval()
    with torch.no_grad():
        fast = fxopt.optimize(model, (torch.randint(0, 50, (6, 5)), torch.randn(6, 1)), CONFIG)
        assert kind is Crossed or applied(fast, "row_chunks")
        for batch in (1, 2 * ROWS + 1, 3 * ROWS):
            for length in (1, 2, 7):
                arguments = torch.randint(0, 50, (batch, length)), torch.randn(batch, 1)
                torch.testing.assert_close(fast(*arguments), model(*arguments))


@pytest.mark.timed
def test_chunks_hold_what_is_picked_by_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that wins up to some rows is a call of two graphs, which makes memory of its own."""
    won = Verdict({1: 2.0, 4096: 0.5})
    monkeypatch.setattr(Tuner, "verdict", lambda self, site: Verdict({4096: 2.0}) if site.rows else won)
    model = LayerLast().eval()
    with torch.no_grad():
        fast = fxopt.optimize(model, inputs(6), fxopt.Config(tune="fast"))
        calls = [node for node in fast._fxopt.entries[0].executable.graph.graph.nodes if node.op == "call_function"]
        assert [node.target.__name__ for node in calls] == ["chunked", "getitem"]
        for batch in SIZES:
            arguments = inputs(batch)
            torch.testing.assert_close(fast(*arguments), model(*arguments), equal_nan=True)


class Squeezed(nn.Module):
    """One row would lose its dim, too."""

    def forward(self, x: Tensor) -> Tensor:
        parts = [x.sin().cumsum(-1).squeeze(), x.cos().cumsum(-1).squeeze()]
        return torch.stack(parts, 1).softmax(1).erf().reshape(-1, 2 * x.shape[2]).cumsum(-1)


@pytest.mark.parametrize("captured", [2, 3, 6])
def test_no_chunk_is_a_single_row(captured: int) -> None:
    model = Squeezed()
    with torch.no_grad():
        fast = fxopt.optimize(model, (torch.randn(captured, 1, 16),), CONFIG)
        for batch in (2 * ROWS, 2 * ROWS + 1, 3 * ROWS + 1, 4 * ROWS + 2, 2, 3):
            x = torch.randn(batch, 1, 16)
            torch.testing.assert_close(fast(x), model(x))
        (findings,) = fast._fxopt.findings
        assert any(ran.name == "row_chunks" and ran.changes for ran in findings.passes)


def test_rows_that_mix_stay_together() -> None:
    with torch.no_grad():
        fast = fxopt.optimize(AllRows().eval(), inputs(6), CONFIG)
    assert not applied(fast, "row_chunks")


def test_training_stays_whole() -> None:
    fast = fxopt.optimize(Interactions(), inputs(6), CONFIG)
    assert not applied(fast, "row_chunks")


def test_a_view_of_an_input_stays_one() -> None:
    class Seen(Interactions):
        def forward(self, ids: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(ids, dense), dense[:, 0]

    with torch.no_grad():
        fast = fxopt.optimize(Seen().eval(), inputs(6), CONFIG)
        ids, dense = inputs(3 * ROWS)
        scores, view = fast(ids, dense)
    assert applied(fast, "row_chunks")
    assert view.data_ptr() == dense.data_ptr()
    torch.testing.assert_close(scores, Interactions.forward(fast, ids, dense))


def test_several_outputs_and_rows_that_are_behind() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = (F.normalize(x, dim=1) @ x.new_ones(5, 5)).softmax(1).cumsum(1) * 3.0 @ x.new_ones(5, 5)
            return y.sigmoid(), (y.transpose(0, 1) * 3).contiguous()

    with torch.no_grad():
        fast = fxopt.optimize(Two(), (torch.randn(4, 5),), CONFIG)
        x = torch.randn(3 * ROWS + 7, 5)
        torch.testing.assert_close(fast(x), Two()(x))
    assert applied(fast, "row_chunks")


def test_an_unknown_call_of_several_tensors_runs_ahead_of_the_chunks() -> None:
    class Sorted(Interactions):
        def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
            order = torch.ops.aten.sort(dense, 0)  # over the batch
            return super().forward(ids, dense - order[0])

    with torch.no_grad():
        model = Sorted().eval()
        fast = fxopt.optimize(model, inputs(6), CONFIG)
        assert applied(fast, "row_chunks")
        arguments = inputs(3 * ROWS + 1)
        torch.testing.assert_close(fast(*arguments), model(*arguments))


@torch.no_grad()
def test_a_size_of_rows_is_no_input_of_theirs() -> None:
    """The size of another dim, read of what is computed by rows."""
    model = Sized().eval()
    module = capture(model, (torch.randn(4, 3),)).graph
    wide, size = (next(iter(module.graph.find_nodes(op="call_function", target=t))) for t in (aten.sin.default, _SIZE))
    size.args = (wide, 1)
    assert apply(row_chunks.REWRITE, module, Fuel(), True, Tuner("off")).changes
    module.recompile()
    for batch in SIZES:
        x = torch.randn(batch, 3)
        torch.testing.assert_close(module(model.weight, x)[0], model(x))


class Edited(Interactions):
    """An opaque module edits what others read before it and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.opaque = Opaque()

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        rows = self.table(ids)
        before = rows.exp().sum(2).tanh()
        seen = self.opaque(rows)
        return torch.cat([before.sin().cos(), rows.exp().sum(2).tanh().sin(), seen.sum(2)], 1)


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if float(x.sum()) > 1e9:
            return x
        return x.mul_(2) + 1


@torch.no_grad()
def test_nothing_moves_past_an_edit_of_an_opaque_module() -> None:
    model = Edited().eval()
    inputs = torch.randint(0, 50, (6, 8)), torch.randn(6, 1)
    fast = fxopt.optimize(model, inputs, CONFIG)
    assert len(fast._fxopt.findings[0].leaves) == 1
    torch.testing.assert_close(fast(*inputs), model(*inputs))


@pytest.mark.timed
def test_what_it_was_timed_at_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str | None] = []
    monkeypatch.setattr(Tuner, "verdict", lambda self, site: keys.append(site.key) or Verdict({256: 2.0}))

    def key_of(width: int) -> str | None:
        torch.manual_seed(0)
        model = Interactions()
        model.top = nn.Linear(64 + 8, width)
        fxopt.optimize(model.eval(), inputs(7), fxopt.Config(disable=("pointwise",)))
        return keys[-1]

    assert key_of(3) == key_of(3) != key_of(4), "another process finds it, and not for another computation"
    assert None not in keys
