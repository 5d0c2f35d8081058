"""Interactions in the spellings that models have, and what only looks like them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxopt import Config, optimize

FIELDS, DIM = 5, 6
LI, LJ = torch.tril_indices(FIELDS, FIELDS, -1).tolist()
PAIRS = list(zip(LI, LJ, strict=True))
FLAT = [i * FIELDS + j for i, j in PAIRS]


class Model(nn.Module):
    """A dense vector and looked up ones, a list `v` and its stack `t` [B, F, D]."""

    def __init__(self, interact: Callable[[Model, list[Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.interact = interact
        self.dense = nn.Linear(3, DIM)
        self.tables = nn.ModuleList(nn.Embedding(20, DIM) for _ in range(FIELDS - 1))
        self.hidden, self.query = nn.Linear(DIM, 5), nn.Linear(5, 1)
        self.register_buffer("pairs", torch.tensor([LI, LJ]))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        v = [self.dense(x), *(table(ids[:, k]) for k, table in enumerate(self.tables))]
        return self.interact(self, v, torch.stack(v, 1))


def gram(t: Tensor) -> Tensor:
    return torch.bmm(t, t.transpose(1, 2))


def beside(v: list[Tensor], z: Tensor) -> Tensor:
    return torch.cat([v[0], z], 1)


def mask(diagonal: int) -> Tensor:
    return torch.ones(FIELDS, FIELDS).tril(diagonal).bool()


def dlrm(self: Model, v: list[Tensor], t: Tensor) -> Tensor:
    """facebookresearch/dlrm: the stack is a cat and a view, the lists are tensors made in forward."""
    t = torch.cat(v, 1).view(v[0].size(0), -1, DIM)
    z = torch.bmm(t, torch.transpose(t, 1, 2))
    return torch.cat([v[0], *[z[:, torch.tensor(LI), torch.tensor(LJ)]]], dim=1)


def deepctr_inner(self: Model, v: list[Tensor], t: Tensor) -> Tensor:
    v = [x.unsqueeze(1) for x in v]
    p, q = torch.cat([v[i] for i in LI], 1), torch.cat([v[j] for j in LJ], 1)
    return torch.cat([torch.cat(v, -1).flatten(1), torch.flatten((p * q).sum(2, keepdim=True), 1)], 1)


def squares(t: Tensor, keepdim: bool = False) -> Tensor:
    return t.sum(1, keepdim=keepdim).pow(2) - (t * t).sum(1, keepdim=keepdim)


def attention(self: Model, p: Tensor) -> Tensor:
    return self.query(torch.relu(self.hidden(p)))


def tensordots(self: Model, v: list[Tensor], t: Tensor) -> Tensor:
    """deepctr's AFM."""
    p = t[:, LI] * t[:, LJ]
    a = torch.relu(torch.tensordot(p, self.hidden.weight.t(), dims=([-1], [0])) + self.hidden.bias)
    return (torch.tensordot(a, self.query.weight.t(), dims=([-1], [0])).softmax(1) * p).sum(1)


DOTS = {
    "dlrm": dlrm,
    "list": lambda self, v, t: beside(v, gram(t)[:, LI, LJ]),
    "buffer": lambda self, v, t: beside(v, gram(t)[:, self.pairs[0], self.pairs[1]]),
    "behind": lambda self, v, t: torch.cat([(t @ t.mT)[:, LJ, LI], v[0]], -1),
    "einsum": lambda self, v, t: torch.einsum("bid,bjd->bij", t, t)[:, LI, LJ],
    "einsum of dots": lambda self, v, t: torch.einsum("b...d,b...d->b...", t[:, LI], t[:, LJ]),
    "einsum of products": lambda self, v, t: torch.einsum("bid,bjd->bijd", t, t).sum(-1)[:, LI, LJ],
    "matrices of one product": lambda self, v, t: (t[:, LI].unsqueeze(2) @ t[:, LJ].unsqueeze(3)).flatten(1),
    "triu_indices": lambda self, v, t: gram(t)[(slice(None), *torch.triu_indices(FIELDS, FIELDS, 0))],
    "flat": lambda self, v, t: beside(v, gram(t).flatten(1).index_select(1, torch.tensor(FLAT))),
    "flat list": lambda self, v, t: gram(t).view(-1, FIELDS**2)[:, FLAT],
    "mask": lambda self, v, t: gram(t)[:, mask(-1)],
    "masked out": lambda self, v, t: gram(t).tril(-1)[:, LI, LJ],
    "rows of the triangle": lambda self, v, t: torch.cat([gram(t)[:, i, :i] for i in range(1, FIELDS)], 1),
    "loop": lambda self, v, t: torch.stack([(v[i] * v[j]).sum(1) for i, j in PAIRS], 1),
    "loop and more": lambda self, v, t: torch.cat([*((v[i] * v[j]).sum(1, keepdim=True) for i, j in PAIRS), v[0]], 1),
    "loop of slices": lambda self, v, t: torch.stack([(t[:, i] * t[:, j]).sum(-1) for i, j in PAIRS], 1),
    "loop of bmms": lambda self, v, t: torch.cat(
        [torch.bmm(v[i].unsqueeze(1), v[j].unsqueeze(2)).squeeze(2) for i, j in PAIRS], 1
    ),
    "torchfm": lambda self, v, t: torch.cat([t.view(-1, FIELDS * DIM), (t[:, LI] * t[:, LJ]).sum(dim=2)], 1),
    "deepctr": deepctr_inner,
    "broadcast": lambda self, v, t: (t.unsqueeze(1) * t.unsqueeze(2)).sum(-1)[:, LI, LJ],
    "all": lambda self, v, t: beside(v, gram(t).flatten(1)),
}
PAIR_SUMS = {
    "torchfm": lambda self, v, t: 0.5 * (t.sum(dim=1) ** 2 - (t**2).sum(dim=1)).sum(dim=1, keepdim=True),
    "deepctr": lambda self, v, t: 0.5 * squares(t, keepdim=True).sum(dim=2, keepdim=False),
    "bi-interaction": lambda self, v, t: beside(v, squares(t) / 2),
    "no half": lambda self, v, t: squares(t),
    "pairs": lambda self, v, t: (t[:, LI] * t[:, LJ]).sum(1),
    "dot products": lambda self, v, t: gram(t)[:, LI, LJ].sum(1, keepdim=True),
    "weighted": lambda self, v, t: 0.5 * squares(t * self.dense.bias[:FIELDS].softmax(0).view(1, -1, 1).expand_as(t)),
    "weights of a row": lambda self, v, t: 0.5 * squares(t * v[0][:, :FIELDS].sigmoid().unsqueeze(-1)),
}


def attention_by_einsums(self: Model, v: list[Tensor], t: Tensor) -> Tensor:
    p = t[:, LI] * t[:, LJ]
    hidden = torch.relu(torch.einsum("...d,hd->...h", p, self.hidden.weight) + self.hidden.bias)
    return (torch.einsum("bph,oh->bpo", hidden, self.query.weight).softmax(1) * p).sum(1)


ATTENTION = {
    "einsums": attention_by_einsums,
    "torchfm": lambda self, v, t: (attention(self, t[:, LI] * t[:, LJ]).softmax(1) * (t[:, LI] * t[:, LJ])).sum(1),
    "tensordots": tensordots,
    "matrix product": lambda self, v, t: torch.bmm(
        attention(self, t[:, LI] * t[:, LJ]).squeeze(-1).softmax(-1).unsqueeze(1), t[:, LI] * t[:, LJ]
    ).squeeze(1),
}
OTHERS = {
    "two tensors": lambda self, v, t: torch.bmm(t, t.exp().transpose(1, 2))[:, LI, LJ],
    "products read elsewhere": lambda self, v, t: gram(t)[:, LI, LJ] * gram(t).sum((1, 2)).unsqueeze(1),
    "dims swapped": lambda self, v, t: torch.bmm(t.transpose(1, 2), t)[:, [0, 1, 2], [1, 2, 3]],
    "scores": lambda self, v, t: torch.bmm(gram(t).softmax(-1), t).flatten(1),
    "zeros of the other half": lambda self, v, t: gram(t).tril(-1)[:, LJ, LI],
    "edited": lambda self, v, t: gram(t).mul_(2)[:, LI, LJ],
    "norms": lambda self, v, t: (t * t).sum(-1),
    "few": lambda self, v, t: (v[0] * v[1]).sum(1, keepdim=True),
    "sum over another dim": lambda self, v, t: t.sum(2).square() - t.square().sum(2),
    "squares of others": lambda self, v, t: t.sum(1).square() - t.exp().square().sum(1),
    "one pair twice": lambda self, v, t: (t[:, [*LI[:-1], 1]] * t[:, [*LJ[:-1], 0]]).sum(1),
    "another activation": lambda self, v, t: (
        self.query(self.hidden(t[:, LI] * t[:, LJ]).tanh()).softmax(1) * (t[:, LI] * t[:, LJ])
    ).sum(1),
}
NAMES = ("dot_interaction", "pair_sum", "pair_attention")
CASES = [
    *(pytest.param(interact, "dot_interaction", id=f"dots, {name}") for name, interact in DOTS.items()),
    *(pytest.param(interact, "pair_sum", id=f"pair sum, {name}") for name, interact in PAIR_SUMS.items()),
    *(pytest.param(interact, "pair_attention", id=f"attention, {name}") for name, interact in ATTENTION.items()),
    *(pytest.param(interact, None, id=name) for name, interact in OTHERS.items()),
]


def inputs(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3), torch.randint(0, 20, (batch, FIELDS - 1))


def applied(model: nn.Module) -> list[str]:
    (findings,) = model._fxopt.findings
    assert not findings.eager_reason and not any(ran.rolled_back for ran in findings.passes)
    return [ran.name for ran in findings.passes if ran.name in NAMES for _ in ran.changes]


@pytest.mark.parametrize(("interact", "name"), CASES)
def test_spellings(interact: Callable, name: str | None) -> None:
    model = Model(interact)
    fast = optimize(model, inputs(5), Config(tune="off", verify="off"))
    assert applied(fast) == ([] if name is None else [name])
    for batch in (1, 2, 19) if interact is dlrm else (0, 1, 2, 19):  # dlrm's own view is not for a batch of 0
        x = inputs(batch)
        expected, found = model(*x), fast(*x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        weight = torch.randn_like(expected)
        grads = [
            torch.autograd.grad((y * weight).sum(), list(model.parameters()), allow_unused=True)
            for y in (found, expected)
        ]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_pairs_in_a_buffer_may_change() -> None:
    model = Model(DOTS["buffer"])
    fast = optimize(model, inputs(5), Config(tune="off"))
    assert applied(fast) == ["dot_interaction"]
    for pairs in ([[1, 2, -1], [0, 0, 1]], [[-1], [4]], [[], []]):
        model.pairs = torch.tensor(pairs, dtype=torch.int64)
        x = inputs(7)
        torch.testing.assert_close(fast(*x), model(*x), rtol=1e-5, atol=1e-5)
    model.pairs = torch.tensor([[0], [5]])
    with pytest.raises(IndexError):
        fast(*inputs(7))


def test_the_columns_still_write_the_vectors() -> None:
    fast = optimize(Model(DOTS["list"]), inputs(5), Config(tune="off"))
    targets = [str(node.target) for node in fast._fxopt.entries[0].executable.graph.graph.nodes]
    assert (
        "fxopt.columns.default" in targets and "aten.stack.default" not in targets and "aten.cat.default" not in targets
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stay_with_torch(dtype: torch.dtype) -> None:
    model = Model(DOTS["list"]).to(dtype)
    x, ids = inputs(6)
    fast = optimize(model, (x.to(dtype), ids), Config(tune="off"))
    assert applied(fast) == []
    torch.testing.assert_close(fast(x.to(dtype), ids), model(x.to(dtype), ids))


class Squashed(torch.nn.Module):
    """A softmax over positions of what an operator of one argument gives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.tanh(x.sum(2, keepdim=True)), 1) * x


@torch.no_grad()
def test_no_pattern_fails() -> None:
    fast = optimize(Squashed(), (torch.randn(4, 5, 3),), Config(tune="off"))
    misses = [miss.reason for ran in fast._fxopt.findings[0].passes for miss in ran.misses]
    assert not any("failed" in reason for reason in misses)
