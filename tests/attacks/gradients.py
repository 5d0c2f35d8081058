"""Bounds and ties, empty axes, and what a caller sees of an output's memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.attacks.attack import Attack
from tests.attacks.sizes import rows


def halves(*shape: int) -> Tensor:
    """Small multiples of a half: many values are exactly at a bound."""
    return torch.randint(-6, 7, shape) / 2


def half_linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-2, 3, layer.weight.shape).float())
        layer.bias.copy_(torch.randint(-1, 2, layer.bias.shape).float())
    return layer


class Bounded(nn.Module):
    """Layers with a bounded activation between."""

    def __init__(self, activation):
        super().__init__()
        self.first, self.second = half_linear(4, 8), half_linear(8, 3)
        self.activation = activation

    def forward(self, x):
        return self.second(self.activation(self.first(x)))


class BoundedTowers(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.towers = nn.ModuleList(nn.ModuleList([half_linear(4, 4), half_linear(4, 2)]) for _ in range(3))
        self.activation = activation

    def forward(self, x):
        return torch.stack([self.activation(b(self.activation(a(x)))) for a, b in self.towers], 1)


class Elementwise(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f
        self.w = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.f(x * self.w) * 2 + 1


def at_bounds(model) -> Attack:
    calls = [lambda n=n: (halves(n, 4).requires_grad_(),) for n in (6, 3, 1)]
    zeros = lambda: (torch.zeros(5, 4).requires_grad_(),)  # noqa: E731
    return Attack(model, [*calls, zeros], grad=True)


ACTIVATIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "clamp_min": lambda x: x.clamp(min=0),
    "clamp_max": lambda x: x.clamp(max=1),
    "clamp": lambda x: torch.clamp(x, -0.5, 0.5),
    "maximum": lambda x: torch.maximum(x, torch.zeros(())),
    "minimum": lambda x: torch.minimum(x, x.detach() * 0 + 1),
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "elu": F.elu,
    "hardsigmoid": lambda x: F.hardsigmoid(x * 3),
    "hardswish": lambda x: F.hardswish(x * 3),
    "abs": torch.abs,
    "threshold": lambda x: F.threshold(x, 0.5, 0.0),
    "softshrink": F.softshrink,
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "square_root": lambda x: x.abs().sqrt(),
    "sign": lambda x: x.sign() * x,
}
REDUCTIONS = {
    "amax": lambda x: x.amax(1, keepdim=True) + x,
    "max": lambda x: x.max(1, keepdim=True).values * x,
    "amin": lambda x: x.amin(0) + x,
    "sort": lambda x: x.sort(1).values * torch.arange(4.0),
    "topk": lambda x: x.topk(2, 1).values.repeat(1, 2) * x,
    "norm": lambda x: x / x.norm(dim=1, keepdim=True).clamp(min=1e-6),
    "normalize": lambda x: F.normalize(x, dim=1),
    "median": lambda x: x.median(1, keepdim=True).values + x,
    "std": lambda x: x.std(1, keepdim=True) * x,
    "cummax": lambda x: x.cummax(1).values * x,
    "prod": lambda x: x.prod(1, keepdim=True) + x,
    "logsumexp": lambda x: x.logsumexp(1, keepdim=True) * x,
}
BOUNDS = {
    **{f"layers_{n}": at_bounds(lambda f=f: Bounded(f)) for n, f in ACTIVATIONS.items()},
    **{f"towers_{n}": at_bounds(lambda f=f: BoundedTowers(f)) for n, f in list(ACTIVATIONS.items())[:8]},
    **{f"elementwise_{n}": at_bounds(lambda f=f: Elementwise(f)) for n, f in (ACTIVATIONS | REDUCTIONS).items()},
}


class EmptyBroadcast(nn.Module):
    def forward(self, y, w):
        batch, length = y.shape
        return y.view(batch, 1, length, 1) * 2 + 1, (y.unsqueeze(2) * w.unsqueeze(1)).tanh()


class MaskedSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 1)

    def forward(self, x):
        scores = self.l(x).squeeze(-1)
        weights = torch.where(scores > 0, scores, scores * 0.5 - 1).softmax(1)
        return (weights.unsqueeze(-1) * x).sum(1)


class TargetAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 1))

    def forward(self, q, k):
        wide = q.unsqueeze(1).expand_as(k)
        scores = self.mlp(torch.cat([wide, k, wide - k, wide * k], -1)).squeeze(-1)
        return (scores.softmax(-1).unsqueeze(1) @ k).squeeze(1)


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return (self.q(x) @ self.k(x).transpose(1, 2) / 2).softmax(-1) @ self.v(x)


class NormOverAxis(nn.Module):
    def forward(self, x):
        centred = x - x.mean(1, keepdim=True)
        return centred / (centred.pow(2).mean(1, keepdim=True) + 1e-5).sqrt(), F.layer_norm(x, (4,)) * 2


class PooledMax(nn.Module):
    def forward(self, x):
        return (x * 2 + 1).amax(1)


class FmOfNone(nn.Module):
    def forward(self, x):
        return 0.5 * (x.sum(1) ** 2 - (x**2).sum(1)).sum(-1, keepdim=True), (x @ x.transpose(1, 2)).flatten(1)


class LookupOfNone(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(9, 4)

    def forward(self, x):
        rows = self.e((x[..., 0].abs() * 3).long() % 9)
        return rows.sum(1), rows.mean(1), (rows * x).sum(1)


def emptied(model, grad: bool = True) -> Attack:
    shapes = ((3, 5, 4), (3, 0, 4), (0, 5, 4), (0, 0, 4), (2, 1, 4), (1, 7, 4), (3, 0, 4))
    return Attack(model, [lambda s=s: (rows(*s).requires_grad_(grad),) for s in shapes], grad=grad)


def first_empty(model) -> Attack:
    return Attack(
        model, [lambda s=s: (rows(*s).requires_grad_(),) for s in ((3, 0, 4), (3, 5, 4), (0, 2, 4))], grad=True
    )


def pairs(model, grad: bool) -> Attack:
    shapes = ((3, 5), (3, 0), (0, 5), (1, 1), (2, 3))
    return Attack(
        model, [lambda s=s: (rows(*s).requires_grad_(grad), rows(*s).requires_grad_(grad)) for s in shapes], grad=grad
    )


EMPTY = {
    "broadcast": pairs(EmptyBroadcast, False),
    "broadcast_with_gradients": pairs(EmptyBroadcast, True),
    "target_attention": Attack(
        TargetAttention,
        [
            lambda s=s: (rows(s[0], 4).requires_grad_(), rows(*s, 4).requires_grad_())
            for s in ((3, 5), (3, 0), (0, 5), (2, 1))
        ],
        grad=True,
    ),
    **{
        f"{name}_{how}": attack(model)
        for name, model in {
            "masked_softmax": MaskedSoftmax, "self_attention": SelfAttention, "norms": NormOverAxis,
            "pooled_max": PooledMax, "fm": FmOfNone, "lookup": LookupOfNone,
        }.items()
        for how, attack in {"later": emptied, "first": first_empty, "inference": lambda m: emptied(m, False)}.items()
    },
}  # fmt: skip


class TransposedProduct(nn.Module):
    def forward(self, x, y):
        return (
            torch.einsum("ij,ij->ij", x.t(), y.t()),
            (x.t() * y.t()) + 1,
            torch.matmul(x.t().unsqueeze(2), y.t().unsqueeze(1)),
        )


class BothOutputs(nn.Module):
    def forward(self, x, y):
        a = x + y
        return a, a.view(-1), x + y, a[:1]


class ReturnsInput(nn.Module):
    def forward(self, x, y):
        return x, x[:, :1], y.t(), y.contiguous(), x.reshape(x.shape), x + 0


class ReturnsState(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("b", torch.ones(3))

    def forward(self, x, y):
        return self.b, self.b[1:], self.b * 1, self.b.clone(), x * self.w


class Permuted(nn.Module):
    def forward(self, x, y):
        return (
            x.t().relu(),
            x.t().contiguous().sigmoid(),
            x.t().softmax(0),
            (x.t() @ y).t(),
            torch.where(x.t() > 0, x.t(), y.t()),
        )


class ExpandedOutput(nn.Module):
    def forward(self, x, y):
        return x[:, :1].expand_as(x), x[:, :1].expand_as(x) * 1, x[:1].expand(x.shape) + y * 0


class StackTransposed(nn.Module):
    def forward(self, x, y):
        return (
            torch.stack([x, y], 0).transpose(0, 1),
            torch.cat([x.t(), y.t()], 0),
            torch.stack([x.t(), y.t()], 1).relu(),
        )


class LinearTransposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(1, 1)

    def forward(self, x, y):
        return self.l(x.flatten()[:, None]).view(x.shape), self.l(x.t().reshape(-1, 1)).view(x.t().shape).t()


class Conv1x1(nn.Module):
    def __init__(self):
        super().__init__()
        self.c = nn.Conv1d(1, 2, 1)

    def forward(self, x, y):
        return self.c(x.unsqueeze(1)), self.c(x.unsqueeze(1)).transpose(1, 2), self.c(x.t().unsqueeze(1)).relu()


class SlicedOutput(nn.Module):
    def forward(self, x, y):
        z = torch.cat([x, y], 1).tanh()
        return z[:, 1:], z[:, ::2] * 2, z.unbind(0)[0] if z.shape[0] else z, z.t()


def seen(model) -> Attack:
    shapes = ((3, 4), (1, 1), (4, 4), (1, 5), (5, 1), (2, 3))
    return Attack(model, [lambda s=s: (rows(*s), rows(*s)) for s in shapes])


def seen_first_at_one(model) -> Attack:
    shapes = ((1, 1), (3, 4), (1, 5), (5, 1))
    return Attack(model, [lambda s=s: (rows(*s), rows(*s)) for s in shapes])


OUTPUTS = {
    f"{model.__name__}_{how.__name__}": how(model)
    for model in (
        TransposedProduct, BothOutputs, ReturnsInput, ReturnsState, Permuted, ExpandedOutput, StackTransposed,
        LinearTransposed, Conv1x1, SlicedOutput,
    )
    for how in (seen, seen_first_at_one)
}  # fmt: skip
