"""linear_chains, linear_pairs: which layers become one, numbers and gradients within the error budget, what stays."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxopt import Config, optimize
from fxopt.kernels.mlp.plan import Op, decode

APPLY = Config(tune="off")


def calls(fast: nn.Module) -> list[list[Op]]:
    """The steps of every call that the last capture makes."""
    graph = fast._fxopt.entries[-1].executable.graph.graph
    assert not any(ran.rolled_back for ran in fast._fxopt.findings[-1].passes)
    nodes = graph.find_nodes(op="call_function", target=torch.ops.fxopt.mlp.default)
    return [[step.op for step in decode(node.args[2])] for node in nodes]


class Joined(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.layers(torch.cat([a, b], -1))


def scaled(model: nn.Module) -> nn.Module:
    """Statistics and weights that leave nothing unused."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model


def between(*activations: nn.Module) -> nn.Module:
    """13 features through three odd layers; the activations behind the first two, the third one at the end."""
    first, second, third = activations
    return Joined(nn.Linear(13, 37), first, nn.Linear(37, 65), second, nn.Linear(65, 3, bias=False), third)


class Dice(nn.Module):
    """As deepctr writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bn, self.alpha = nn.BatchNorm1d(width, eps=1e-8), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        p = torch.sigmoid(self.bn(x))
        return self.alpha * (1 - p) * x + p * x


class FactoredDice(Dice):
    def forward(self, x: Tensor) -> Tensor:
        p = self.bn(x).sigmoid()
        return x * (p + (1.0 - p) * self.alpha)


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * x


class NearDice(Dice):
    """The gate is read twice, and one of its products is squared."""

    def forward(self, x: Tensor) -> Tensor:
        p = self.bn(x).sigmoid()
        return self.alpha * (1 - p) * x + p * x * x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "relu": lambda: between(nn.ReLU(inplace=True), nn.ReLU(), nn.Identity()),
    "from results": lambda: between(nn.Sigmoid(), nn.Tanh(), nn.ReLU()),
    "gelu": lambda: between(nn.GELU(), nn.GELU("tanh"), nn.SiLU()),
    "slopes": lambda: between(nn.PReLU(37), nn.PReLU(), nn.LeakyReLU(0.2)),
    "bounded": lambda: between(nn.ReLU6(), nn.Hardtanh(-0.5, 2), nn.Softplus()),
    "norms": lambda: between(nn.LayerNorm(37), nn.Sequential(nn.LayerNorm(65, bias=False), nn.ELU()), nn.Sigmoid()),
    "gates": lambda: between(Dice(37), FactoredDice(65), Swish()),
    "batch norms": lambda: between(
        nn.BatchNorm1d(37), nn.Sequential(nn.BatchNorm1d(65, affine=False), nn.ReLU()), nn.ReLU()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients(name: str) -> None:
    model = scaled(MODELS[name]()).eval()
    exact = copy.deepcopy(model).double()
    fast = optimize(model, config=APPLY)
    for rows in (0, 1, 2, 9, 130):
        a, b = torch.randn(rows, 6, requires_grad=True), torch.randn(7, rows).t().requires_grad_()
        doubles = [x.detach().double().requires_grad_() for x in (a, b)]
        found, expected, reference = (
            everything(net, *inputs) for net, inputs in ((fast, (a, b)), (model, (a, b)), (exact, doubles))
        )
        close(found, expected, reference)
        with torch.no_grad():
            close([fast(a, b)], [model(a, b)], [exact(*doubles)])
    (steps,) = calls(fast)
    assert steps.count(Op.LINEAR) == 3


def everything(net: nn.Module, *inputs: Tensor) -> list[Tensor]:
    y = net(*inputs)
    weight = torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape).cos()
    return [y, *torch.autograd.grad((y * weight).sum(), [*net.parameters(), *inputs])]


def close(found: list[Tensor], expected: list[Tensor], exact: list[Tensor]) -> None:
    """No further from float64 than twice what eager is, plus rounding."""
    for ours, eagers, value in zip(found, expected, exact, strict=True):
        assert ours.shape == eagers.shape and ours.dtype == eagers.dtype
        if not value.numel():
            continue
        rounding = 16 * torch.finfo(torch.float32).eps * value.abs().max().item()
        assert (ours - value).abs().max() <= 2 * (eagers - value).abs().max() + rounding


def test_more_than_two_dims_and_transposed_rows() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.PReLU(), nn.Linear(8, 2))
    fast = optimize(model, config=APPLY)
    for x in (torch.randn(3, 4, 5), torch.randn(4, 3, 5).transpose(0, 1), torch.randn(5, 3, 4).permute(1, 2, 0),
              torch.randn(1, 1, 5).expand(3, 4, 5), torch.randn(3, 0, 5)):  # fmt: skip
        leaf = x.requires_grad_()
        found, expected = ([net(leaf), *torch.autograd.grad(net(leaf).square().sum(), leaf)] for net in (fast, model))
        torch.testing.assert_close(found, expected)


def test_weights_that_change_are_read_anew() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval()
    fast, x = optimize(model, config=APPLY), torch.randn(5, 6)
    with torch.no_grad():
        fast(x)
        model[0].weight.data.mul_(2)  # no version tells of this edit
        model[1].running_mean.data.add_(1)
        model[3].weight = nn.Parameter(torch.randn(2, 8))
        torch.testing.assert_close(fast(x), model(x))


def test_tied_layers_and_frozen_ones() -> None:
    tied = nn.Linear(8, 8)
    model = nn.Sequential(tied, nn.ReLU(), tied, nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    model[4].requires_grad_(False)
    tied.bias.requires_grad_(False)
    fast, x = optimize(model, config=APPLY), torch.randn(9, 8)
    leaves = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found, expected = (torch.autograd.grad(net(x).square().sum(), leaves) for net in (fast, model))
    torch.testing.assert_close(found, expected)
    assert len(calls(fast)) == 1


def test_second_derivatives() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    fast, x = optimize(model, config=APPLY), torch.randn(5, 4, requires_grad=True)

    def second(net: nn.Module) -> tuple[Tensor, ...]:
        (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [net[0].weight, net[2].weight])

    torch.testing.assert_close(second(fast), second(model))


def test_the_result_may_be_edited_before_the_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    fast, x = optimize(model, config=APPLY), torch.randn(5, 4)
    found, expected = (torch.autograd.grad(net(x).mul_(2).sum(), list(net.parameters())) for net in (fast, model))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("warm", [True, False])
def test_checkpointing(warm: bool) -> None:
    """It computes again until it has what was kept, and stops there in the middle of the graph."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    fast, x = optimize(model, config=APPLY), torch.randn(5, 6, requires_grad=True)
    if warm:
        fast(x)
    found, expected = (
        torch.autograd.grad(checkpoint(net, x, use_reentrant=False).square().sum(), list(model.parameters()))
        for net in (fast, model)
    )
    torch.testing.assert_close(found, expected)
    assert fast._fxopt.entries[0].executable is not None


class SeenInBetween(nn.Sequential):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self[0](x).relu()
        return hidden, self[1](hidden)


class SeenAsItIs(nn.Sequential):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self[0](x)
        return hidden, self[1](hidden)


class NotThisWay(nn.Sequential):
    """The value of one layer is the weight of the next."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self[0](x)
        return F.linear(self[0].weight, hidden)


class Broadcast(nn.Linear):
    """Its bias is one number, or one for each row."""

    def __init__(self, inputs: int, outputs: int, *sizes: int) -> None:
        super().__init__(inputs, outputs)
        self.bias = nn.Parameter(torch.zeros(sizes))


def two(between: nn.Module | None = None) -> list[nn.Module]:
    return [nn.Linear(6, 8), *([between] if between else []), nn.Linear(8, 8)]


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (SeenInBetween(*two()), (5, 6), [[Op.LINEAR, Op.RELU], [Op.LINEAR]]),
        (NotThisWay(nn.Linear(6, 6)), (5, 6), [[Op.LINEAR], [Op.LINEAR]]),
        (nn.Sequential(*two(nn.PReLU(5))), (3, 5, 6), [[Op.LINEAR], [Op.LINEAR]]),
        (nn.Sequential(*two(nn.BatchNorm1d(5))), (3, 5, 6), [[Op.LINEAR], [Op.LINEAR]]),
        (nn.Sequential(*two(Dice(8))), (5, 6), [[Op.LINEAR, Op.DICE, Op.LINEAR]]),
        (nn.Sequential(*two(NearDice(8))), (5, 6), [[Op.LINEAR], [Op.LINEAR]]),
        (nn.Sequential(*two(nn.Softmax(1))), (5, 6), [[Op.LINEAR], [Op.LINEAR]]),
        (nn.Sequential(*two(nn.ELU(0.5))), (5, 6), [[Op.LINEAR, Op.ELU, Op.LINEAR]]),
        (nn.Sequential(*two(nn.Softplus(2.0))), (5, 6), [[Op.LINEAR], [Op.LINEAR]]),
        (nn.Sequential(nn.Linear(6, 2), nn.Dropout(), nn.Linear(2, 8)), (5, 6), [[Op.LINEAR, Op.LINEAR]]),
        (nn.Sequential(Broadcast(6, 8, 1), nn.ReLU(), nn.Linear(8, 8)), (5, 6), [[Op.RELU, Op.LINEAR]]),
        (nn.Sequential(Broadcast(6, 8, 5, 1), nn.ReLU(), nn.Linear(8, 8)), (5, 6), [[Op.RELU, Op.LINEAR]]),
        (nn.Sequential(Broadcast(6, 60, 1), nn.Linear(60, 3)), (5, 6), [[Op.LINEAR]]),
        (nn.Sequential(*two()).double(), (5, 6), []),
        (nn.Sequential(*two()).bfloat16(), (5, 6), []),
    ],
)
def test_where_a_chain_ends(model: nn.Module, shape: tuple[int, ...], expected: list[list[Op]]) -> None:
    fast = optimize(scaled(model).eval(), config=APPLY)
    x = torch.randn(shape, dtype=next(model.parameters()).dtype)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert calls(fast) == expected


def test_training_modes_stay_between() -> None:
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)
    )
    fast, eager, x = optimize(model, config=APPLY), copy.deepcopy(model), torch.randn(7, 6)
    torch.manual_seed(0)
    found = fast(x)
    torch.manual_seed(0)
    torch.testing.assert_close(found, eager(x))
    torch.testing.assert_close(model[1].running_mean, eager[1].running_mean)
    assert calls(fast) == [[Op.LINEAR], [Op.LINEAR], [Op.LINEAR]]


def test_a_hook_that_changes_a_value() -> None:
    model = nn.Sequential(*two(nn.ReLU()))
    model[0].register_forward_hook(lambda module, args, y: y * 2)
    fast, x = optimize(model, config=APPLY), torch.randn(5, 6)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))


def pair(K: int, H: int, N: int, bias: tuple[bool, bool] = (True, True)) -> nn.Module:
    return nn.Sequential(nn.Linear(K, H, bias=bias[0]), nn.Dropout(), nn.Linear(H, N, bias=bias[1])).eval()


@pytest.mark.parametrize("bias", [(True, True), (True, False), (False, True)])
def test_two_layers_with_nothing_in_between_are_one(bias: tuple[bool, bool]) -> None:
    model = pair(20, 60, 3, bias)
    fast = optimize(model, config=APPLY)
    for x in (torch.randn(7, 20), torch.randn(2, 3, 20), torch.randn(0, 20)):
        found, expected = (
            [net(x), *torch.autograd.grad(net(x).square().sum(), list(net.parameters()))] for net in (fast, model)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        model[0].weight.data.add_(0.1)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert calls(fast) == [[Op.LINEAR]]


@pytest.mark.parametrize(
    "model", [pair(20, 4, 30), nn.Sequential(*two(nn.ReLU())), SeenAsItIs(nn.Linear(6, 8), nn.Linear(8, 1))]
)
def test_two_layers_that_stay_two(model: nn.Module) -> None:
    fast = optimize(model, (torch.randn(3, next(model.parameters()).shape[1]),), config=APPLY)
    assert sum(len(steps) - steps.count(Op.RELU) for steps in calls(fast)) == 2


def test_layers_that_no_cache_holds() -> None:
    model = scaled(
        nn.Sequential(nn.Linear(1500, 1400), nn.ReLU(), nn.LayerNorm(1400), nn.Linear(1400, 2), nn.Sigmoid())
    )
    model[0].weight.data.mul_(0.1)
    fast, exact = optimize(model, config=APPLY), copy.deepcopy(model).double()
    for rows in (1, 70):
        x = torch.randn(rows, 1500)
        with torch.no_grad():
            close([fast(x)], [model(x)], [exact(x.double())])
        close(*(everything(net, x.to(net[0].weight.dtype).requires_grad_()) for net in (fast, model, exact)))
