"""Pointwise chains in many spellings become one operator with eager's numbers; what may not, stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.rewrites import PASSES

ONLY = tuple(rewrite.name for rewrite in PASSES if rewrite.name not in ("pointwise", "views", "identities", "sizes"))
B, N, D = 6, 5, 8


class Model(nn.Module):
    """`function` of the columns of a matrix, made contiguous by a product with the identity's size."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.norm = nn.BatchNorm1d(D)
        self.layer_norm = nn.LayerNorm(D)
        self.vector = nn.Parameter(torch.randn(D))
        self.column = nn.Parameter(torch.randn(D, 1))
        self.one = nn.Parameter(torch.randn(1))
        self.register_buffer("mask", torch.rand(D) > 0.5)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        self.norm.running_mean.normal_()  # type: ignore[union-attr]
        self.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        self.eval()

    def forward(self, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
        return self.function(self, x.cumsum(1), e.cumsum(2), lengths)


def inputs(rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, D, dtype=dtype), torch.randn(rows, N, D, dtype=dtype), torch.randint(0, N, (rows,))


def fused(model: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, list[str]]:
    """The optimized model, and its operators but for those that make the inputs."""
    with torch.no_grad():
        fast = optimize(model, inputs(B, dtype), Config(verify="full", tune="off", disable=ONLY))
    (findings,) = fast._fxopt.findings
    assert not findings.eager_reason and not any(ran.rolled_back for ran in findings.passes)
    graph = fast._fxopt.entries[0].executable.graph.graph
    targets = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return fast, [target._schema.name for target in targets if target is not torch.ops.aten.cumsum.default]


def dice(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    p = torch.sigmoid(m.norm(x))
    return m.vector * (1 - p) * x + p * x


def masked(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    keep = (x != 0) & (x > -3) | m.mask
    return torch.where(keep, x, x.clamp(-1, 2) / 3).masked_fill(~keep, -7.5) * keep.float()


def attention(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    scores = (e * x.unsqueeze(1)).sum(2)
    return (torch.softmax(scores, 1).unsqueeze(-1) * e).sum(1)


def second_order(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    return 0.5 * (e.sum(1).pow(2) - e.square().sum(1)).sum(1, keepdim=True)


def second_order_kept(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    total = torch.sum(e, dim=1, keepdim=True)
    return (0.5 * torch.sum(total * total - torch.sum(e * e, dim=1, keepdim=True), dim=2)).squeeze(1).sigmoid()


def residual_norm(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    return F.gelu(m.layer_norm(e + x[:, None])) + e


def cross(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    y = x
    for _ in range(3):
        y = x * torch.matmul(y, m.column) + m.vector + y
    return y


def excited(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    weights = torch.tanh(e.mean(-1) * m.one + 1)
    return e * weights.unsqueeze(2).expand_as(e) + torch.log1p(e.abs())


def logit(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    return torch.sigmoid(x.sum(1, keepdim=True) + m.one + x @ m.column).squeeze(1)


def extrema(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    centered = e - e.amax(dim=(1, 2), keepdim=True)
    return torch.log_softmax(centered, dim=-1) - e.amin(1).unsqueeze(1) * 2


def steep(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    return F.prelu(F.leaky_relu(x, 0.2), m.vector) + F.softplus(x) * F.silu(1 - x) - torch.rsub(x, 2, alpha=3)


def transposed(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    return (e.transpose(1, 2) * x.unsqueeze(2) + m.vector.unsqueeze(1)).transpose(1, 2).relu().contiguous()


def of_lengths(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    weight = (lengths > 2).float().unsqueeze(1)
    return (x * weight + lengths.unsqueeze(1)) / (weight + 1)


def stepped(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    return torch.addcmul(x, x, m.vector, value=0.5).add(x, alpha=2).sub(1).neg().exp().reciprocal().sqrt()


def cosines(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    return (F.normalize(e, dim=-1) * F.normalize(x, dim=1).unsqueeze(1)).sum(2)


def length_of_rows(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    return e.norm(dim=(1, 2)).unsqueeze(1) * x - torch.linalg.vector_norm(x, dim=1, keepdim=True)


def of_expanded(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    vector = m.vector.expand_as(x)
    return x * vector.exp() + vector.square()


def bent(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    y = F.elu(x, 0.7) + F.celu(x, 1.3) * F.selu(x) - F.mish(x) + F.softplus(x, 2.0) * F.logsigmoid(x)
    return y + F.gelu(x, approximate="tanh") * x**4


def clipped(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    y = F.hardtanh(x, -0.5, 0.3) + F.relu6(x * 4) + F.hardsigmoid(x * 3)
    return y * F.hardswish(x * 3) + F.threshold(x, 0.1, -2.0) + (x / (lengths > 1)[:, None].float()).nan_to_num(0.5)


def standardized(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    y = m.vector * (e - e.mean(-1, keepdim=True)) / (e.std(-1, keepdim=True) + 1e-6) + m.one
    return y * e.var(-1, unbiased=False)[:, :, None] - e.var(2, correction=2, keepdim=True)


FUSED = [dice, masked, attention, second_order, second_order_kept, residual_norm, cross, excited, logit, extrema]
FUSED += [steep, transposed, of_lengths, stepped, cosines, length_of_rows, of_expanded, bent, clipped, standardized]


@pytest.mark.parametrize("function", FUSED)
def test_one_operator_with_eagers_numbers(function: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    model = Model(function)
    fast, operators = fused(model)
    assert operators.count("fxopt::pointwise") == 1
    assert not {name for name in operators if name.startswith("aten")} - VIEWS
    with torch.no_grad():
        for rows in (0, 1, 3, 200):
            given = inputs(rows)
            expected, found = model(*given), fast(*given)
            exact = Model.forward(model.double(), *(t.double() if t.is_floating_point() else t for t in given))
            model.float()
            assert found.dtype == expected.dtype
            assert found.stride() == expected.stride() or found.numel() == 0
            bound = 2 * (expected - exact).abs().max() + 1e-5 if rows else 0
            assert not rows or (found - exact).abs().max() <= bound
        strided = torch.randn(9, 2 * D)[:, ::2], torch.randn(D, N, 9).permute(2, 1, 0), torch.arange(9) % N
        torch.testing.assert_close(fast(*strided), model(*strided), rtol=1e-5, atol=1e-5)


VIEWS = {
    "aten::sym_size",
    "aten::unsqueeze",
    "aten::squeeze",
    "aten::view",
    "aten::reshape",
    "aten::expand",
    "aten::permute",
}


def training_norm(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True) * x


def edited(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    base = torch.zeros(x.shape[0] * 2, D)
    half = base[: x.shape[0]]
    half.copy_(x)
    y = half * m.vector
    base.fill_(1.0)
    return y + half


def over_rows(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    return x.sum(0) * 2


def random(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    return F.dropout(x, 0.0, training=True) * 2


def large_integers(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    return (lengths == 16777217).float().unsqueeze(1) * x


def own_transpose(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    return (m.vector.unsqueeze(0) * m.vector.unsqueeze(1)).sum()


def pairs_of_rows(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    score = x.sum(1)
    return torch.sigmoid((score.unsqueeze(1) - score.unsqueeze(0)) * 2).sum(1)


def other_norms(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    return torch.cat([x.norm(p, dim=1, keepdim=True) * 2 for p in (1, 3, float("inf"))], 1)


def all_expanded(m: Model, x: Tensor, e: Tensor, lengths: Tensor) -> Tensor:
    return x.unsqueeze(1).expand(-1, N, -1).square().exp().tanh()


LEFT_ALONE = [pairs_of_rows, training_norm, edited, over_rows, random, large_integers, own_transpose, other_norms]
LEFT_ALONE += [all_expanded]


@pytest.mark.parametrize("function", LEFT_ALONE)
def test_is_left_alone(function: Callable[..., Tensor]) -> None:
    model = Model(function)
    fast, operators = fused(model)
    assert "fxopt::pointwise" not in operators
    given = inputs(4)
    with torch.no_grad():
        torch.testing.assert_close(fast(*given), model(*given))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_left_alone(dtype: torch.dtype) -> None:
    _, operators = fused(Model(dice).to(dtype), dtype)
    assert "fxopt::pointwise" not in operators


class Between(nn.Module):
    """What lies between two operators of a chain stays between them; a value read twice is written once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor, e: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.cumsum(1)
        gate = torch.sigmoid(x + 1) * 2
        y = self.layer(gate)
        out = (gate * y + x).tanh()
        return out, gate.unsqueeze(1), out.sum(1)


def test_groups_around_what_they_cannot_take() -> None:
    model = Between()
    fast, operators = fused(model)
    assert operators.count("fxopt::pointwise") == 2
    given = inputs(7)
    with torch.no_grad():
        torch.testing.assert_close(fast(*given), model(*given))


class PartlyFrozen(nn.Module):
    """A chain that begins where gradients are off."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            weight = torch.sigmoid(x.cumsum(1) * self.scale)
        return (weight * self.scale + 1).tanh() * weight


def test_regions_without_gradients_are_left_alone() -> None:
    model = PartlyFrozen()
    fast = optimize(model, (torch.randn(B, D),), Config(tune="off", disable=ONLY))
    x = torch.randn(5, D)
    expected, found = (torch.autograd.grad(net(x).square().sum(), model.scale)[0] for net in (model, fast))
    torch.testing.assert_close(found, expected)


def test_gradients_and_new_weights() -> None:
    model = Model(dice)
    fast = optimize(model, inputs(B), Config(tune="off", disable=ONLY))
    for _ in range(2):
        given = inputs(5)
        loss = [torch.autograd.grad(net(*given).square().sum(), [net.vector, net.norm.bias]) for net in (model, fast)]
        torch.testing.assert_close(loss[1], loss[0])
        with torch.no_grad():
            model.vector.add_(1)
            model.norm.running_var.data = model.norm.running_var + 1  # type: ignore[operator, union-attr]


def test_a_norm_of_zeros_has_no_gradient() -> None:
    """Through the root of a sum of squares it would be NaN."""
    model = Model(cosines)
    fast = optimize(model, inputs(B), Config(tune="off", disable=ONLY))
    given = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in inputs(5)]
    with torch.no_grad():
        given[0][2], given[1][:, 1] = 0, 0
    expected, found = (torch.autograd.grad(net(*given).square().sum(), given[:2]) for net in (model, fast))
    assert not found[0].isnan().any()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("function", [bent, clipped, standardized])
def test_gradients_of_activations_are_eagers_also_where_their_pieces_meet(function: Callable[..., Tensor]) -> None:
    model = Model(function)
    fast = optimize(model, inputs(B), Config(tune="off", disable=ONLY))
    x, e, lengths = inputs(9)
    with torch.no_grad():
        ends = torch.tensor([0.0, -0.5, 0.3, 1.5, 1.0, -1.0, 0.1, 30.0, -40.0])
        x.copy_(torch.cat([ends[:, None], torch.zeros(9, D - 1)], 1))  # its sums along the columns are these
        e[:3] = 0
    given = [x.requires_grad_(), e.requires_grad_(), lengths]
    expected, found = (torch.autograd.grad(net(*given).sum(), [x, e], allow_unused=True) for net in (model, fast))
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)


class Scaled(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.ones(D)), function

    def forward(self, x: Tensor) -> Tensor:
        return (self.function(x * self.scale) + 1e-8).log()


@pytest.mark.parametrize(("middle", "width"), [(0.0, 1.0), (100.0, 1e-3), (1e4, 0.01), (1e5, 0.03), (1 / 3, 0.0)])
@pytest.mark.parametrize("name", ["std", "var"])
def test_variances_far_from_zero(name: str, middle: float, width: float) -> None:
    model = Scaled(lambda x: getattr(x, name)(-1, keepdim=True)).eval()
    fast = optimize(model, (torch.randn(B, D),), Config(tune="off", disable=ONLY))
    x = middle + width * torch.randn(9, D)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "value"),
    [
        (lambda x: F.celu(x, -1.0), -20.0),
        (lambda x: F.softplus(x, 2.0), 3e38),
        (lambda x: F.softplus(x, 1000.0), 1e36),
        (F.elu, -15.0),
        (lambda x: F.elu(x, 0.5), -30.0),
        (F.selu, -17.0),
    ],
    ids=["celu", "softplus", "steep softplus", "elu", "half an elu", "selu"],
)
def test_large_values_of_activations(function: Callable[[Tensor], Tensor], value: float) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(D))

        def forward(self, x: Tensor) -> Tensor:
            return function(x * self.scale) * 0.5 + torch.tanh(x * self.scale) * 0.25

    model, x = Both(), torch.full((9, D), value, requires_grad=True)
    fast = optimize(model, (torch.randn(B, D),), Config(tune="off", disable=ONLY))
    torch.testing.assert_close(fast(x), model(x))
    expected, found = (torch.autograd.grad(net(x).sum(), x)[0] for net in (model, fast))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)


class Mixture(nn.Module):
    """Low-rank cross layers of two experts: what has rows at batch 1 is the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(13, 4)), nn.Parameter(torch.randn(13, 4))
        self.inner, self.gate = nn.Parameter(torch.randn(4, 4)), nn.Linear(13, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = x = x.unsqueeze(2)
        for _ in range(2):
            low = torch.tanh(self.inner @ torch.tanh(self.down.t() @ x))
            experts = torch.stack([(first * (self.up @ low)).squeeze(2)] * 2, 2)
            gates = torch.stack([self.gate(x.squeeze(2))] * 2, 1)
            x = experts @ gates.softmax(1) + x
        return x.squeeze()


@torch.no_grad()
def test_axes_of_what_is_left_out_do_not_count() -> None:
    model, x = Mixture(), torch.randn(1, 13)
    fast = optimize(model, (x,), Config(tune="off"))
    assert not any(ran.rolled_back for ran in fast._fxopt.findings[0].passes)
    torch.testing.assert_close(fast(x), model(x))


SPECIAL = [0.0, -0.0, 1.0, -2.5, 7.0, 1e8, -3e30, 1e-30, float("inf"), float("-inf"), float("nan")]
SEVERAL_STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{f"lerp {w}": lambda x, y, w=w: torch.lerp(x, y, w) for w in (0.0, 0.3, 0.5, 0.9, 1.0, -0.7, 2.0)},
    "lerp by a tensor": lambda x, y: torch.lerp(x, y, torch.sigmoid(y)),
    "lerp by halves": lambda x, y: torch.lerp(x, y, (x > 0).float() * 0.5),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "add": lambda x, y: torch.add(x, y, alpha=3),
    "rsub": lambda x, y: torch.rsub(x, y, alpha=2),
    "square": lambda x, y: x**2 - y**3,
    "roots": lambda x, y: x**0.5 + y**-1,
    "clamp": lambda x, y: x.clamp(-1, 2) + y.clamp(min=3, max=-3),
    "leaky": lambda x, y: F.leaky_relu(x, 0.2) + F.leaky_relu(y, -0.5),
    "masked": lambda x, y: x.masked_fill(y > 0, float("-inf")),
    "where": lambda x, y: torch.where(x > y, x, y * 0),
    "softplus": lambda x, y: F.softplus(x) + F.elu(y),
}


@pytest.mark.parametrize("function", SEVERAL_STEPS.values(), ids=SEVERAL_STEPS)
def test_special_values_go_the_way_of_eager(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Special(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.relu(function(x, y) * 3 + y)

    values = torch.tensor(SPECIAL)
    given = tuple(side.contiguous() for side in torch.meshgrid(values, values, indexing="ij"))
    fast = optimize(Special(), given, Config(verify="off", tune="off"))
    torch.testing.assert_close(fast(*given), Special()(*given), equal_nan=True)


@torch.no_grad()
def test_one_value_that_is_returned_three_times() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Embedding(20, 4), nn.Embedding(20, 4)

        def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
            product = self.left(ids[:, :1]) * self.right(ids[:, 1:2])
            product.mul_(2)
            return product.sum(2), product.sum((1, 2)), product.sum((1, 2))

    model, ids = Sums().eval(), torch.randint(0, 20, (9, 2))
    fast = optimize(model, (ids,), Config(tune="off"))
    (findings,) = fast._fxopt.findings
    assert not any(ran.rolled_back for ran in findings.passes)
    torch.testing.assert_close(fast(ids), model(ids))
