"""Training calls of columns that C++ records: what eager's autograd gives, also where somebody looks closely."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.kernels.columns import recorder

pytestmark = pytest.mark.skipif(recorder._module() is None, reason="needs a C++ compiler")


class Model(nn.Module):
    def __init__(self, mode: str = "sum", tables: int = 3) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(11, 4, mode=mode) for _ in range(tables))  # type: ignore[arg-type]
        self.lookup = nn.Embedding(7, 4, padding_idx=2)

    def forward(self, ids: Tensor) -> Tensor:
        bags = [bag(ids + number) for number, bag in enumerate(self.bags)]
        return torch.cat([*bags, self.lookup(ids[:, 0])], 1)


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(7, 4), nn.Embedding(7, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x[:, 0]) * 2, self.second(x[:, 1]) * 3


@pytest.fixture
def models() -> tuple[nn.Module, nn.Module]:
    model = Model()
    return model, optimize(copy.deepcopy(model), config=Config(tune="off"))


def ids(batch: int = 5) -> Tensor:
    return torch.randint(0, 7, (batch, 3))


def _tripled(table: Tensor) -> None:
    assert table.grad is not None
    table.grad.mul_(3)


def node_of(y: Tensor) -> Any:
    assert y.grad_fn is not None
    return y.grad_fn


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model.zero_grad(set_to_none=True)
    y = model(x)
    y.backward(torch.arange(y.numel()).view(y.shape).cos())
    return [y.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("batch", [0, 1, 5, 64])
def test_gradients_are_eagers(mode: str, batch: int) -> None:
    model = Model(mode)
    fast, x = optimize(copy.deepcopy(model), ids(), Config(tune="off")), ids(batch)
    torch.testing.assert_close(gradients(fast, x), gradients(model, x))
    assert "Columns" in node_of(fast(x)).name()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.lookup.weight.requires_grad_(False),
        lambda model: model.double(),
        lambda model: model.bags[0].weight.register_hook(lambda grad: grad * 2),
        lambda model: model.bags[0].weight.register_post_accumulate_grad_hook(_tripled),
    ],
    ids=["frozen", "double", "hook", "hook behind"],
)
def test_changed_tables(change: Callable[[Any], Any]) -> None:
    model = Model()
    fast = optimize(copy.deepcopy(model), config=Config(tune="off"))
    for each in (model, fast):
        change(each)
    for x in (ids(), ids(1)):
        torch.testing.assert_close(gradients(fast, x), gradients(model, x))


def test_an_edit_of_ids_is_refused_and_one_of_tables_is_not(models: tuple[nn.Module, nn.Module]) -> None:
    for model in models:
        x = ids()
        y = model(x).sum()
        with torch.no_grad():
            model.lookup.weight.add_(1)
        y.backward()
        y = model(x).sum()
        x.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_a_graph_lives_once(models: tuple[nn.Module, nn.Module]) -> None:
    for model in models:
        y = model(ids()).sum()
        y.backward(retain_graph=True)
        y.backward()
        with pytest.raises(RuntimeError, match="second time"):
            y.backward()


def test_some_tables_alone(models: tuple[nn.Module, nn.Module]) -> None:
    x, found = ids(), []
    for model in models:
        found.append(torch.autograd.grad(model(x).square().sum(), [model.lookup.weight]))
    torch.testing.assert_close(found[1], found[0])


def test_gradients_of_gradients() -> None:
    model = TwoResults()
    x, found = ids(), []
    for each in (model, optimize(copy.deepcopy(model), config=Config(tune="off"))):
        tables = list(each.parameters())
        first = torch.autograd.grad(sum(y.pow(3).sum() for y in each(x)), tables, create_graph=True)
        found.append(torch.autograd.grad(sum(grad.square().sum() for grad in first), tables))
    torch.testing.assert_close(found[1], found[0])


def test_many_gradients_at_once(models: tuple[nn.Module, nn.Module]) -> None:
    x, found, many = ids(), [], torch.rand(3, 5, 16)
    for model in models:
        found.append(torch.autograd.grad(model(x), list(model.parameters()), many, is_grads_batched=True))
    torch.testing.assert_close(found[1], found[0])


def test_a_result_that_nobody_differentiates() -> None:
    model = TwoResults()
    fast, x = optimize(copy.deepcopy(model), config=Config(tune="off")), ids()
    for each in (model, fast):
        each(x)[0].sum().backward()
    assert fast.second.weight.grad is None  # type: ignore[union-attr]
    torch.testing.assert_close(fast.first.weight.grad, model.first.weight.grad)  # type: ignore[union-attr]


def test_hooks_of_saved_tensors(models: tuple[nn.Module, nn.Module]) -> None:
    x = ids()
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = gradients(models[1], x)
    torch.testing.assert_close(found, gradients(models[0], x))
    assert any(tensor.data_ptr() == x.data_ptr() for tensor in packed)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.autograd.set_detect_anomaly])
def test_modes(models: tuple[nn.Module, nn.Module], around: Callable[..., Any]) -> None:
    x = ids()
    with around(True) if around is torch.autograd.set_detect_anomaly else around():
        y, expected = models[1](x), models[0](x)
    torch.testing.assert_close(y, expected)
    assert y.requires_grad == expected.requires_grad


def test_threads(models: tuple[nn.Module, nn.Module]) -> None:
    x = ids(64)
    expected = gradients(models[0], x)[1:]
    tables = list(models[1].parameters())
    models[1](x)
    weight = torch.arange(64 * 16).view(64, 16).cos()
    found: list[Any] = []

    def run() -> None:
        for _ in range(20):
            found.append(torch.autograd.grad(models[1](x), tables, weight))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    for each in found:
        torch.testing.assert_close(list(each), expected)


def test_errors_are_those_of_a_plain_call() -> None:
    fast = optimize(TwoResults(), ids(), Config(tune="off"))
    with pytest.raises(IndexError):
        fast(torch.full((5, 3), 99))


def test_nothing_is_kept(models: tuple[nn.Module, nn.Module]) -> None:
    import gc
    import weakref

    x = ids()
    y = models[1](x)
    seen = weakref.ref(x)
    del x, y
    gc.collect()
    assert seen() is None


def test_where_nothing_is_compiled(models: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_module", lambda: None)
    x = ids()
    torch.testing.assert_close(gradients(models[1], x), gradients(models[0], x))
    assert "Recorded" in node_of(models[1](x)).name()


def test_torch_functions_and_modes_around(models: tuple[nn.Module, nn.Module]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = ids()
    expected = gradients(models[0], x)
    for around in (FlopCounterMode(display=False), torch.profiler.profile(), contextlib.nullcontext()):
        with around:
            found = gradients(models[1], x)
        torch.testing.assert_close(found, expected)
