"""Linear layers on a GPU by each of their ways, against fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxopt
from fxopt.kernels.mlp.cuda import joined
from fxopt.kernels.mlp.cuda.linear import OPERATORS, gpu_linear, gpu_linears, gpu_padded, reference
from fxopt.rewrites import attention, linear_layers, views
from fxopt.rewrites.framework import core
from fxopt.rewrites.framework.regions import after, before, inputs_of
from fxopt.shape.view_operators import ORDERS
from tests.cuda.on_a_gpu import graph_of, names_of, rewritten
from tests.cuda.pretended import traced


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["", "relu", "sigmoid"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("M", "K", "N"),
    [
        (1, 40, 1),
        (77, 301, 1),
        (33, 4099, 260),
        (512, 8152, 1024),
        (100, 4160, 300),
        (5, 64, 32),
        (0, 8, 1),
        (0, 13, 8),
        (256, 32, 32),
        (1, 13, 7),
        (2048, 32, 128),
        (9000, 16, 513),
        (300, 100, 20),
        (256, 429, 429),
        (20, 200, 80),
        (33, 128, 64),
    ],
)
def test_equals_fp64(M, K, N, bias, activation):
    x, weight = torch.randn(M, K, device="cuda"), torch.randn(N, K, device="cuda") / K**0.5
    b = torch.randn(N, device="cuda") if bias else None
    with torch.no_grad():
        found, eager = gpu_linear(x, weight, b, activation), reference(x, weight, b, activation)
        exact = reference(x.double(), weight.double(), None if b is None else b.double(), activation)
    assert found.shape == (M, N)
    if M:
        assert (found - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "K", "N"), [(256, 429, 429), (3, 900, 33), (256, 256, 128), (40, 512, 65)])
def test_inputs_cut_among_warps_in_tf32(M, K, N, monkeypatch):
    x, weight, b = torch.randn(M, K, device="cuda"), torch.randn(N, K, device="cuda") / K**0.5, torch.randn(N).cuda()
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    with torch.no_grad():
        found, exact = gpu_linear(x, weight, b, "relu"), reference(x.double(), weight.double(), b.double(), "relu")
    assert (found - exact).abs().max() <= 4e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("M", "K", "N"),
    [
        (70, 256, 1),
        (3, 33, 1),
        (64, 415, 128),
        (64, 64, 32),
        (1, 13, 512),
        (2100, 13, 512),
        (77, 31, 9),
        (0, 13, 4),
        (1, 415, 33),
        (1, 4096, 40),
    ],
)
def test_halves(M, K, N, dtype):
    x, weight = torch.randn(M, K, device="cuda").to(dtype), (torch.randn(N, K, device="cuda") / K**0.5).to(dtype)
    bias = torch.randn(N, device="cuda").to(dtype)
    for activation in ("relu", "sigmoid"):
        with torch.no_grad():
            found = gpu_linear(x, weight, bias, activation)
        exact = reference(x.double(), weight.double(), bias.double(), activation)
        if not M:
            assert found.shape == (0, N)
            continue
        assert found.dtype == dtype and (found - exact).abs().max() <= 2 * torch.finfo(dtype).eps * (
            1 + exact.abs().max()
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_any_stride(dtype):
    x, weight = (
        torch.randn(50, 40, device="cuda").to(dtype)[:, 3:16],
        torch.randn(20, 21, device="cuda").to(dtype)[:, 1:14],
    )
    eps = max(torch.finfo(dtype).eps, 1e-6)
    with torch.no_grad():
        for rows in (x, x.t().contiguous().t(), x[:1].expand(50, -1)):
            found = gpu_linear(rows, weight, None, "").double()
            torch.testing.assert_close(found, rows.double() @ weight.double().t(), rtol=2 * eps, atol=20 * eps)
    if dtype is not torch.float32:
        assert torch.equal(gpu_padded(x, 16), torch.nn.functional.pad(x, (0, 3)))


@pytest.mark.gpu
def test_nan_passes_a_relu():
    x = torch.randn(64, 4096, device="cuda")
    x[3, 7] = float("nan")
    weight, bias = torch.randn(256, 4096, device="cuda"), torch.randn(256, device="cuda")
    assert gpu_linear(x, weight, bias, "relu").isnan().any(1).nonzero().flatten().tolist() == [3]


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "K", "N"), [(40, 4100, 256), (512, 4203, 260), (256, 8152, 1024)])
def test_a_single_output_behind_parts(M, K, N):
    x, weights = torch.randn(M, K, device="cuda"), [torch.randn(N, K, device="cuda") / K**0.5]
    weights.append(torch.randn(1, N, device="cuda") / N**0.5)
    biases = [torch.randn(N, device="cuda"), torch.randn(1, device="cuda")]
    with torch.no_grad():
        found = gpu_linears(x, weights, biases, ["relu", "sigmoid"])
        exact = reference(x.double(), weights[0].double(), biases[0].double(), "relu")
        exact = reference(exact, weights[1].double(), biases[1].double(), "sigmoid")
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_a_tower_is_rewritten():
    model = nn.Sequential(nn.Linear(5000, 512), nn.ReLU(), nn.Linear(512, 1), nn.Sigmoid()).cuda().eval()
    x = torch.randn(200, 5000, device="cuda")
    with torch.no_grad():
        optimized = fxopt.optimize(model, (x,))
        torch.testing.assert_close(optimized(x), model(x), rtol=1e-3, atol=1e-4)
        (found,) = optimized._fxopt.findings
        assert sum(len(ran.changes) for ran in found.passes if ran.name == "gpu_linears") == 2


def test_the_operator_gives_eagers_numbers_everywhere():
    OPERATORS.load()
    x, weight = torch.randn(3, 5), torch.randn(2, 5)
    assert torch.equal(torch.ops.fxopt.gpu_linear(x, weight, None, "relu"), torch.relu(x @ weight.t()))


def joined_tower(long, short, weight, bias):
    return torch.relu(F.linear(torch.cat([long, short], 1), weight, bias)) * 2


def test_a_layer_of_a_long_piece_reads_it_as_it_lies():
    shapes = [(40, 2000), (40, 13), (64, 2013), (64,)]
    module, given = graph_of(joined_tower, shapes), [torch.randn(*shape) for shape in shapes]
    *_, ran = rewritten(module, linear_layers.REWRITE, linear_layers.OF_PIECES)
    assert ran.changes and not ran.rolled_back
    assert "aten.cat" not in names_of(module)
    torch.testing.assert_close(module(*given), joined_tower(*given), rtol=1e-4, atol=1e-4)


def test_layers_of_short_or_edited_pieces_stay():
    def short_one(long, short, weight, bias, nothing):
        return joined_tower(long, short, weight, bias)

    def read_twice(long, short, weight, bias, nothing):
        x = torch.cat([long, short], 1)
        return torch.relu(F.linear(x, weight, bias)), x * 2

    def empty(long, short, weight, bias, nothing):
        return torch.relu(F.linear(torch.cat([long, nothing, short], 1), weight, bias)) * 2

    def edited(long, short, weight, bias, nothing):
        y = joined_tower(long, short, weight, bias)
        long.zero_()
        return y

    for function, width in ((short_one, 1000), (read_twice, 2000), (empty, 2000), (edited, 2000)):
        module = graph_of(function, [(40, width), (40, 13), (64, width + 13), (64,), (0,)])
        *_, ran = rewritten(module, linear_layers.REWRITE, linear_layers.OF_PIECES)
        assert not ran.changes


def attended(q, k, v):
    """Two heads of 4 channels, as torch's own attention splits them."""
    q, k, v = (each.view(len(each), -1, 4).transpose(0, 1) for each in (q, k, v))
    return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1), v)


def heads(x, weight, bias):
    y = F.linear(x.transpose(0, 1), weight, bias).unflatten(-1, (3, 8))
    return attended(*y.permute(2, 0, 1, 3).contiguous())


def layers_of_their_own(x, weight, bias):
    y = x.transpose(0, 1)
    return attended(*(F.linear(y, w, b) for w, b in zip(weight.chunk(3), bias.chunk(3), strict=True)))


def residual(x, weight, bias):
    y = (x * 2).permute(1, 0, 2)
    return F.layer_norm(torch.cat([y, y, y], 2) + F.linear(y, weight, bias), (24,))


def turned_back(x, weight, bias):
    y = F.linear(x.unsqueeze(2).expand(-1, -1, 3, -1).contiguous().permute(1, 2, 0, 3), weight, bias)
    return F.linear(y.permute(2, 0, 1, 3).reshape(-1, 24), weight.t())


TURNED = [(6, 5, 8), (24, 8), (24,)]


@pytest.mark.parametrize(
    ("function", "layers", "turns"), [(heads, 1, 1), (layers_of_their_own, 3, 3), (residual, 1, 2), (turned_back, 1, 1)]
)
def test_a_layer_of_a_turned_tensor_reads_it_before_the_turn(function, layers, turns):
    given = [torch.randn(*shape) for shape in TURNED]
    module = traced(function, given)
    _, ran, _ = rewritten(module, attention.REWRITE, linear_layers.TURNED, views.OF_COLUMNS)
    assert len(ran.changes) == layers and not ran.rolled_back
    assert sum(node.target in ORDERS for node in module.graph.nodes) == turns
    layer, *_ = module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert layer.args[0].target not in ORDERS
    torch.testing.assert_close(module(*given), function(*given))


def test_a_trial_of_a_turned_layer_makes_up_its_source_alone(monkeypatch):
    """Values that the two ways would not agree on: the turned tensor has another reader."""

    class Trial:
        def judged(self, editor, values, policy):
            regions = [before(list(values)), after(editor.added, list(values.values()))]
            assert [node.name for node in inputs_of(regions)] == ["mul", "weight_1", "bias_1"]
            return values, ""

    monkeypatch.setattr(core, "Trial", lambda tuner, training: Trial())
    module = traced(residual, [torch.randn(*shape) for shape in TURNED])
    found = core.apply(linear_layers.TURNED, module, core.Fuel(), True, object())
    assert found.changes and not found.rolled_back


def test_turned_layers_stay_where_it_would_be_seen_or_gain_nothing():
    def normalized(y):
        return F.layer_norm(y.transpose(0, 1), (24,))

    def result(x, weight, bias):
        return F.linear(x.transpose(0, 1), weight, bias).transpose(0, 1)

    def read_in_rows(x, weight, bias):
        return F.linear(F.linear(x.transpose(0, 1), weight, bias).reshape(-1, 24), weight.t())

    def in_front(x, weight, bias):
        return F.layer_norm(F.linear(x.transpose(0, 1), weight, bias) + x.new_ones(5, 6, 24), (24,))

    def without_bias(x, weight, bias):
        return normalized(F.linear(x.transpose(0, 1), weight))

    def of_columns(x, weight, bias):
        return F.layer_norm(F.linear(x.transpose(1, 2), weight[:, :5], bias).transpose(1, 2), (8,))

    def of_a_slice(x, weight, bias):
        return normalized(F.linear(torch.cat([x, x], 2)[:, :, :8].transpose(0, 1), weight, bias))

    def edited(x, weight, bias):
        y = x * 2
        z = normalized(F.linear(y.transpose(0, 1), weight, bias))
        y.zero_()
        return z

    given = [torch.randn(*shape) for shape in TURNED]
    for function in (heads, result, read_in_rows, in_front, without_bias, of_columns, of_a_slice, edited):
        (ran,) = rewritten(traced(function, given), linear_layers.TURNED)
        assert not ran.changes and not ran.misses and not ran.rolled_back
    (ran,) = rewritten(traced(residual, given), linear_layers.TURNED, inference=False)
    assert not ran.changes


@pytest.mark.gpu
@pytest.mark.parametrize("M", [32, 256, 700])
@pytest.mark.parametrize("widths", [(10400, 13), (5, 2056, 3), (1032, 1504), (2001, 13)])
def test_pieces_equal_fp64(M, widths):
    pieces, K = [torch.randn(M, width, device="cuda") for width in widths], sum(widths)
    weight, bias = torch.randn(128, K, device="cuda") / K**0.5, torch.randn(128, device="cuda")
    with torch.no_grad():
        found, eager = (f(pieces, weight, bias, "relu") for f in (joined.gpu_joined_linear, joined.reference))
        exact = joined.reference([piece.double() for piece in pieces], weight.double(), bias.double(), "relu")
    assert (found - exact).abs().max() <= 2 * (eager - exact).abs().max() + 1e-6
