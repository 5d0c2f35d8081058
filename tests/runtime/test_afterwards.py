"""What users do with a module after it was optimized: fxopt holds on to none of its tensors."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
from torch import nn
from torch.nn.utils import prune

import fxopt
from fxopt.runtime import dispatcher_of

CONFIGS = {
    "plain": fxopt.Config(tune="off", verify="off"),  # nothing hides a wrong rewrite
    "timed": fxopt.Config(),
    "bf16": fxopt.Config(tune="off", precision="bf16"),
    "int8": fxopt.Config(tune="off", precision="int8"),
}


class Ranker(nn.Module):
    def __init__(self, wide: int = 5):
        super().__init__()
        self.table, self.bag = nn.Embedding(9, 4), nn.EmbeddingBag(9, 2, mode="sum")
        self.layers = nn.Sequential(nn.Linear(9, wide), nn.BatchNorm1d(wide), nn.ReLU(), nn.Linear(wide, 3))

    def forward(self, x, ids):
        return self.layers(torch.cat([x.to(self.table.weight.dtype), self.table(ids[:, 0]), self.bag(ids)], 1))


def example(rows: int = 5) -> tuple:
    return torch.randn(rows, 3), torch.randint(0, 9, (rows, 4))


def optimized(config: str = "plain", wide: int = 5) -> tuple[nn.Module, Any]:
    model = Ranker(wide).eval()
    fast = fxopt.optimize(model, config=CONFIGS[config])
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            fast(*example())
    assert all(entry.executable is not None for entry in dispatcher_of(fast).entries)
    return model, fast


def agree(fast: nn.Module, model: nn.Module) -> None:
    for rows in (4, 1, 0):
        inputs = example(rows)
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                torch.testing.assert_close(fast(*inputs), model(*inputs))


@pytest.mark.timed
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("trained", [False, True])
def test_tensors_may_be_swapped(config, trained):
    model, fast = optimized(config, 512)
    if trained:
        fast(*example()).sum().backward()
        fast.zero_grad()
    for tensor in [*model.parameters(), *model.buffers()]:
        other = tensor.detach() + 1
        torch.utils.swap_tensors(tensor, nn.Parameter(other) if isinstance(tensor, nn.Parameter) else other)
    inputs = example(4)
    torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.bfloat16, nn.Module.half])
def test_conversions_may_swap(convert):
    model, fast = optimized()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        convert(fast)
        for tensor in [*model.parameters(), *model.buffers()]:
            torch.nn.init.ones_(tensor)
        fast.load_state_dict(Ranker().to(model.table.weight.dtype).state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    agree(fast, model)


def freed(model: nn.Module, replace: Callable[[], Any]) -> None:
    old = [weakref.ref(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())]
    replace()
    gc.collect()
    assert not [reference for reference in old if reference() is not None]


@pytest.mark.parametrize("config", ["plain", "bf16", "int8"])
@pytest.mark.parametrize("called", [False, True])
def test_weights_that_were_replaced_are_freed(config, called):
    model, fast = optimized(config, 512)
    new = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    freed(model, lambda: (fast.load_state_dict(new, assign=True), called and fast(*example())))


def test_a_model_that_is_gone_is_freed():
    model, fast = optimized()
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in model.parameters()]
    del model, fast
    gc.collect()
    assert not [reference for reference in storages if reference() is not None]


def test_tensors_carry_nothing_of_ours():
    model, _ = optimized("timed")
    for tensor in [*model.parameters(), *model.buffers()]:
        assert not vars(tensor) and not tensor._backward_hooks and not weakref.getweakrefs(tensor)
    assert not [name for module in model.modules() for name in vars(module) if "fxopt" in name]


class Adapter(nn.Module):
    def __init__(self, inner: nn.Linear):
        super().__init__()
        self.inner, self.down, self.up = inner, nn.Linear(inner.in_features, 2), nn.Linear(2, inner.out_features)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


class Half(nn.Module):
    def forward(self, weight):
        return weight / 2


def saved(model: nn.Module) -> None:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file), assign=True)


AFTERWARDS: dict[str, Callable[[Any], Any]] = {
    "an adapter": lambda m: m.layers.__setitem__(0, Adapter(m.layers[0])),
    "another of its class": lambda m: m.layers.__setitem__(0, nn.Linear(9, 5)),
    "wider": lambda m: (m.layers.__setitem__(0, nn.Linear(9, 6)), m.layers.__setitem__(1, nn.Identity()),
                        m.layers.__setitem__(3, nn.Linear(6, 3))),
    "fewer layers": lambda m: m.layers.__delitem__(1),
    "a layer more": lambda m: m.layers.append(nn.Tanh()),
    "weight norm": lambda m: nn.utils.parametrizations.weight_norm(m.layers[0]),
    "the old weight norm": lambda m: nn.utils.weight_norm(m.layers[0]),
    "spectral norm": lambda m: nn.utils.parametrizations.spectral_norm(m.layers[3]).eval(),
    "a parametrization": lambda m: parametrize.register_parametrization(m.layers[0], "weight", Half()),
    "and without": lambda m: (parametrize.register_parametrization(m.layers[0], "weight", Half()), m(*example()),
                              parametrize.remove_parametrizations(m.layers[0], "weight")),
    "pruned": lambda m: prune.random_unstructured(m.layers[0], "weight", 0.5),
    "pruned for good": lambda m: (prune.l1_unstructured(m.table, "weight", 0.5), prune.remove(m.table, "weight")),
    "frozen": lambda m: m.requires_grad_(False),
    "shared": lambda m: m.share_memory(),
    "apply": lambda m: m.apply(lambda x: nn.init.ones_(x.weight) if isinstance(x, nn.Linear) else None),
    "double": lambda m: m.double(),
    "edited": lambda m: [tensor.detach().mul_(0.5) for tensor in m.parameters()],
    "a larger table": lambda m: setattr(m.table.weight, "data", torch.randn(12, 4)),
    "to": lambda m: m.to(torch.float64),
    "there and back": lambda m: m.double().float(),
    "saved": saved,
    "a hook inside": lambda m: m.layers[0].register_forward_hook(lambda module, args, out: out * 2),
    "a hook before": lambda m: m.table.register_forward_pre_hook(lambda module, args: (args[0] * 0,)),
    "data": lambda m: setattr(m.layers[0].weight, "data", torch.randn(5, 9)),
    "a new parameter": lambda m: setattr(m.layers[0], "weight", nn.Parameter(torch.randn(5, 9))),
    "no bias": lambda m: setattr(m.layers[0], "bias", None),
    "another forward": lambda m: setattr(m.layers[2], "forward", torch.tanh),
    "buffers": lambda m: m.layers[1].running_mean.add_(3),
    "other statistics": lambda m: setattr(m.layers[1], "running_var", torch.full((5,), 4.0)),
    "tied": lambda m: setattr(m.layers[0], "weight", nn.Parameter(m.layers[0].weight.detach().t().contiguous().t())),
}  # fmt: skip


@pytest.mark.parametrize("name", AFTERWARDS)
def test_the_answers_are_those_of_the_model(name):
    model, fast = optimized()
    AFTERWARDS[name](model)
    agree(fast, model)


@pytest.mark.parametrize("grad", [True, False])
def test_ids_beyond_a_smaller_table_raise(grad):
    model, fast = optimized()
    model.table.weight.data = torch.randn(7, 4)
    with torch.set_grad_enabled(grad), pytest.raises(IndexError):
        fast(torch.randn(2, 3), torch.tensor([[3] * 4, [8] * 4]))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy])
@pytest.mark.parametrize("name", ["an adapter", "weight norm", "double", "frozen", "data"])
def test_and_of_its_duplicates(name, duplicate):
    model, fast = optimized()
    if duplicate is copy.copy:
        AFTERWARDS[name](model)
    twin = duplicate(fast)
    if duplicate is not copy.copy:
        AFTERWARDS[name](dispatcher_of(twin).original)
    agree(twin, dispatcher_of(twin).original)
    agree(fast, model)


def test_traced_scripted_and_replicated():
    model, fast = optimized()
    inputs = example()
    torch.testing.assert_close(torch.jit.trace(fast, inputs)(*inputs), model(*inputs))
    torch.testing.assert_close(nn.DataParallel(fast)(*inputs), model(*inputs))
