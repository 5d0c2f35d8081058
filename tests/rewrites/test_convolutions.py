"""Convolutions of kernel 1 as linears: chains of them, what is seen of their memory, and what is no linear."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.rewrites import PASSES
from fxopt.tune.tuner import Site, Tuner, Verdict

OTHERS = tuple(ran.name for ran in PASSES if ran.name not in ("convolutions", "views_of_columns"))


class Model(nn.Module):
    def __init__(self, f: Callable[..., Tensor]) -> None:
        super().__init__()
        self.f = f
        self.one = nn.Parameter(torch.randn(6, 6, 1))
        self.three = nn.Parameter(torch.randn(6, 6, 3))
        self.b = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x, self.one, self.three, self.b)


def feed_forward(x: Tensor, one: Tensor, three: Tensor, b: Tensor) -> Tensor:
    inner = F.conv1d(x.transpose(1, 2), one, b).relu()
    return F.layer_norm(F.conv1d(inner, one).transpose(-1, -2) + x, (6,))


def read_twice(x: Tensor, one: Tensor, three: Tensor, b: Tensor) -> Tensor:
    inner = F.conv1d(x.transpose(1, 2), one, b).tanh()
    return (F.conv1d(inner, one) + inner).sum(2)


def images(x: Tensor, one: Tensor, three: Tensor, b: Tensor) -> Tensor:
    y = F.conv2d(x.unsqueeze(2).expand(-1, -1, 3, -1).permute(0, 3, 1, 2), one.unsqueeze(3), b)
    return F.linear(F.gelu(y).sum((2, 3)), one.squeeze(2))


FOUND: dict[str, tuple[Callable[..., Tensor], int]] = {
    "a chain": (feed_forward, 1),
    "an inner result that is read twice": (read_twice, 2),
    "images": (images, 1),
    "strides that the caller sees": (lambda x, one, three, b: F.conv1d(x.transpose(1, 2), one, b), 1),
    "channels first": (lambda x, one, three, b: F.conv1d(x[:, :, :4].repeat(1, 6, 1)[:, :6], one, b).amax(1), 1),
    "a kernel of 3": (lambda x, one, three, b: F.conv1d(x.transpose(1, 2), three, b), 0),
    "every other position": (lambda x, one, three, b: F.conv1d(x.transpose(1, 2), one, b, stride=2), 0),
    "zeros around": (lambda x, one, three, b: F.conv1d(x.transpose(1, 2), one, b, padding=1), 0),
    "groups": (lambda x, one, three, b: F.conv1d(x.transpose(1, 2), one[:, :3], b, groups=2), 0),
    "edited": (lambda x, one, three, b: F.conv1d(x.transpose(1, 2), one, b).transpose(0, 1)[0].mul_(2.0), 0),
}


@pytest.mark.parametrize("name", FOUND)
def test_kernels_of_1(name: str) -> None:
    f, expected = FOUND[name]
    model, make = Model(f), lambda rows: torch.randn(rows, 5, 6)
    fast = optimize(model, (make(6),), Config(tune="off", disable=OTHERS))
    (found,) = fast._fxopt.findings  # type: ignore[union-attr, misc]
    assert not found.eager_reason and not [ran.rolled_back for ran in found.passes if ran.rolled_back]
    assert [len(ran.changes) for ran in found.passes if ran.name == "convolutions"] == [expected]
    for rows in (1, 2, 7):
        x = make(rows)
        want, have = model(x), fast(x)
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
        assert have.stride() == want.stride()
        grads = [
            torch.autograd.grad(net(x).square().sum(), list(model.parameters()), allow_unused=True)
            for net in (model, fast)
        ]
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast(make(0)), model(make(0)))


@pytest.mark.parametrize("grad", [True, False])
def test_a_dropout_draws_in_the_order_of_memory(grad: bool) -> None:
    """A result that lies channels last would lose other elements than eager's: nothing has to be taken back."""
    model = Model(lambda x, one, three, b: F.dropout(F.conv1d(x.transpose(1, 2), one, b), 0.5, True).relu().sum(2))
    x = torch.randn(4, 5, 6)
    with torch.set_grad_enabled(grad):
        fast = optimize(model, (x,), Config(tune="off"))
        for other in (x, torch.randn(9, 7, 6), torch.randn(1, 3, 6)):
            torch.manual_seed(3)
            expected = model(other)
            torch.manual_seed(3)
            torch.testing.assert_close(fast(other), expected)
    passes = fast._fxopt.findings[0].passes  # type: ignore[union-attr]
    assert not [change for ran in passes for change in ran.rolled_back]
    assert [len(ran.changes) for ran in passes if ran.name == "convolutions"] == [1]


def test_views_around_a_chain_cancel() -> None:
    """The linears then read what the model transposed, so that all of it is one call."""
    model, x = Model(feed_forward).eval(), torch.randn(6, 5, 6)
    with torch.no_grad():
        fast = optimize(model, (x,), Config(tune="off"))
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    graph = fast._fxopt.entries[0].executable.graph.graph  # type: ignore[union-attr, index]
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert names.count("fxopt.mlp.default") == 1 and not [name for name in names if "conv" in name]
    assert not [name for name in names if "permute" in name or "transpose" in name]


class Convolved(nn.Module):
    """A convolution of kernel 1: of an input, or of the products of a compressed interaction."""

    def __init__(self, products: bool) -> None:
        super().__init__()
        self.products = products
        self.layer = nn.Conv1d(9 if products else 3, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.einsum("bhd,bmd->bhmd", x, x).flatten(1, 2) if self.products else x).relu().sum(-1)


@pytest.mark.parametrize("products", [False, True])
def test_nothing_of_no_length_is_convolved(products: bool) -> None:
    """Eager raises, where a linear would serve it."""
    model = Convolved(products)
    fast = optimize(model, (torch.randn(2, 3, 5),), Config(verify="off", tune="off"))
    for length in (5, 1, 7):
        x = torch.randn(2, 3, length)
        torch.testing.assert_close(fast(x), model(x))
    for net in (model, fast):
        with pytest.raises(RuntimeError, match="Kernel size"):
            net(torch.randn(2, 3, 0))


class Interacting(nn.Module):
    """A compressed interaction network, which views the products of what the layer before it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(width * 4, 6, 1) for width in (4, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        hidden, results = x, []
        for layer in self.layers:
            products = torch.einsum("bhd,bmd->bhmd", hidden, x)
            hidden = layer(products.view(x.shape[0], -1, x.shape[2])).relu()
            results.append(hidden)
        return torch.cat(results, 1).sum(-1)


@pytest.mark.timed
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kept", range(3))
def test_a_view_within_a_call_that_is_picked_by_the_rows(
    kept: int, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One interaction is taken up to some rows, and for more of them stays a view of products in their order."""
    asked = []

    def verdict(self: Tuner, site: Site) -> Verdict:
        asked.append(site)
        return Verdict({1: 2.0, 4096: 0.5} if len(asked) - 1 == kept else {1: 0.5} if len(asked) <= 3 else {1: 2.0})

    monkeypatch.setattr(Tuner, "verdict", verdict)
    model, disabled = Interacting(), tuple(name for name in OTHERS if name != "compressed_interaction")
    with torch.set_grad_enabled(grad):
        fast = optimize(model, (torch.randn(3, 4, 5),), Config(tune="fast", disable=disabled))
        for rows in (3, 200, 2):
            x = torch.randn(rows, 4, 5)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    (found,) = fast._fxopt.findings  # type: ignore[union-attr, misc]
    assert not found.eager_reason and not [ran.rolled_back for ran in found.passes if ran.rolled_back]
    assert [len(ran.changes) for ran in found.passes if ran.name == "compressed_interaction"] == [1]
    assert [len(ran.changes) for ran in found.passes if ran.name == "convolutions"] == [2]
