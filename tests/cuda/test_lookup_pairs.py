"""Products of lookups that are repeated, on CUDA: each row is looked up once, and errors name what they named."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.capture import capture
from fxopt.rewrites.framework.direct import direct
from tests.cuda.on_a_gpu import names_of
from tests.cuda.pretended import rewritten

ROWS, FIELDS, DIM = 30, 6, 5
PAIRS = list(combinations(range(FIELDS), 2))


class Dots(nn.Module):
    """As deepctr-torch's PNN: the vectors of either side one beside the other, multiplied, and summed."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(FIELDS))
        self.top = nn.Linear(len(PAIRS), 3)

    def sides(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = [table(ids[:, f : f + 1]) for f, table in enumerate(self.tables)]
        left, right = (torch.cat([rows[pair[side]] for pair in PAIRS], dim=1) for side in range(2))
        return left, right

    def product(self, ids: Tensor) -> Tensor:
        left, right = self.sides(ids)
        return left * right

    def forward(self, ids: Tensor) -> object:
        return self.top(torch.sum(self.product(ids), dim=2, keepdim=True).flatten(1))


class Attended(Dots):
    """As its AFM: several operators read the products, and the columns write more than them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(ROWS, 1)
        self.attention = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> object:
        product = self.product(ids)
        weights = torch.softmax(self.attention(product), dim=1)
        return self.first(ids).sum(1) + (weights * product).sum((1, 2)).unsqueeze(1)


class SumsToo(Dots):
    """A sum, and what reads the products beside it: dots are computed by themselves."""

    def forward(self, ids: Tensor) -> object:
        product = self.product(ids)
        return product.sum(2) @ self.top.weight.t(), product.exp()


class Total(Dots):
    def forward(self, ids: Tensor) -> object:
        return torch.sigmoid(self.product(ids).sum(2).sum(1, keepdim=True))


class Flat(Dots):
    """Of one row, in which nothing keeps the vectors apart."""

    def forward(self, ids: Tensor) -> object:
        return self.product(ids).flatten(1).exp()


class FieldAware(Dots):
    """Each pair has rows of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(FIELDS * FIELDS))

    def sides(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = [[self.more[i * FIELDS + j](ids[:, i : i + 1]) for j in range(FIELDS)] for i in range(FIELDS)]
        left, right = [rows[i][j] for i, j in PAIRS], [rows[j][i] for i, j in PAIRS]
        return torch.cat(left, dim=1), torch.cat(right, dim=1)


class Seen(Dots):
    """The rows leave the model as well."""

    def forward(self, ids: Tensor) -> object:
        left, right = self.sides(ids)
        return (left * right).sum(2), left


class Squares(Dots):
    """Each row times itself, once."""

    def forward(self, ids: Tensor) -> object:
        rows = torch.cat([table(ids[:, f : f + 1]) for f, table in enumerate(self.tables)], dim=1)
        return torch.sigmoid((rows * rows).sum(2))


class Doubles(Dots):
    def __init__(self) -> None:
        super().__init__()
        self.double()


def ids_of(batch: int) -> Tensor:
    return torch.randint(0, ROWS, (batch, FIELDS))


def served(model: nn.Module, disable: tuple[str, ...] = ()):
    """The model as the passes for a GPU leave it, run on the CPU; its graph, and what the pass did."""
    with torch.no_grad():
        captured = capture(model, (ids_of(6),))
    module, findings = rewritten(captured.graph, fxopt.Config(disable=disable))
    changes = [change.what for ran in findings for change in ran.changes if ran.name == "gpu_lookup_pairs"]
    assert not any(ran.rolled_back for ran in findings if ran.name == "gpu_lookup_pairs")
    return lambda ids: module(*[slot.read(model) for slot in captured.state], ids), module, changes


def results_of(model: nn.Module, ids: Tensor) -> list[Tensor]:
    found = model(ids)
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize(
    ("make", "dots"), [(Dots, True), (Attended, False), (SumsToo, False), (Total, True), (Flat, False)]
)
@torch.no_grad()
def test_gives_eagers_numbers(make, dots):
    model = make().eval()
    call, module, changes = served(model)
    kind = "dot products" if dots else "products"
    assert changes == [f"{kind} of {len(PAIRS)} pairs of {FIELDS} lookups in one launch"]
    calls = module.graph.find_nodes(op="call_function", target=torch.ops.fxopt.gpu_pairs.default)
    pairs, *more = sorted(calls, key=lambda call: call.args[3])
    assert [call.args[3] for call in more] == [True] * (make is SumsToo)
    assert list(pairs.args[0].meta["val"].shape[1:]) == [FIELDS, DIM] and pairs.args[3] is dots
    assert names_of(module).count("fxopt.columns") == 1
    for batch in (0, 1, 2, 300):
        ids = ids_of(batch)
        torch.testing.assert_close(list(call(ids)), results_of(model, ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [FieldAware, Seen, Squares, Doubles])
@torch.no_grad()
def test_leaves_alone(make):
    model = make().eval()
    call, module, changes = served(model)
    assert not changes and "fxopt.gpu_pairs" not in names_of(module)
    ids = ids_of(9)
    torch.testing.assert_close(list(call(ids)), results_of(model, ids))


@pytest.mark.parametrize("field", range(FIELDS))
@torch.no_grad()
def test_bad_ids_raise_what_they_raised(field):
    model, ids = Attended().eval(), ids_of(40)
    ids[31, field] = ROWS
    told = []
    for disable in ((), ("gpu_lookup_pairs",)):
        call, module, _ = served(model, disable)
        direct(module)  # calls whose errors are explained
        module.recompile()
        with pytest.raises(IndexError, match=f"id {ROWS} at row 31") as error:
            call(ids)
        told.append(str(error.value))
    assert told[0] == told[1]


@pytest.mark.gpu
@pytest.mark.parametrize("make", [Dots, Attended, Total])
@torch.no_grad()
def test_on_a_gpu(make):
    model = make().eval().cuda()
    fast = fxopt.optimize(model, (ids_of(6).cuda(),))
    (found,) = fast._fxopt.findings
    assert any(ran.changes for ran in found.passes if ran.name == "gpu_lookup_pairs")
    for batch in (0, 1, 2, 300):
        ids = ids_of(batch).cuda()
        torch.testing.assert_close(fast(ids), model(ids), rtol=1e-4, atol=1e-5)
