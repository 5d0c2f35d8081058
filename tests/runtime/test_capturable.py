"""What a captured graph asks of the operators that it calls, without knowing them (fxopt/facts.py)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxopt import Config, optimize
from fxopt.findings import Place
from fxopt.kernels.columns.encode import plan_of
from fxopt.patterns.core import calls_of_ours
from fxopt.runtime.capturable import NoGraph, clamps, draws, is_on_cuda, ready, suited


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(30, 4, mode="sum") for _ in range(2))

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return torch.cat([table(ids, offsets) for table in self.tables], 1)


def graph(bad_ids: str) -> GraphModule:
    config = Config(tune="off", bad_ids=bad_ids)
    inputs = torch.randint(0, 30, (9,)), torch.tensor([0, 2, 2, 5])
    with torch.no_grad():
        (entry,) = optimize(Bags().eval(), inputs, config)._fxopt.entries
    return entry.executable.graph


def last_included(module: GraphModule, twin: GraphModule) -> bool:
    """What the plan that `twin` holds says of the last bag, for the one call of columns in `module`."""
    (call,) = calls_of_ours(module.graph, "fxopt::columns")
    (found,) = {column.bag.include_last for column in plan_of(getattr(twin, call.args[2].target)).columns}
    return found


@pytest.mark.parametrize("bad_ids", ["raise", "clamp", "unchecked"])
def test_ids_are_counted_where_they_are_clamped(bad_ids: str) -> None:
    assert clamps(graph(bad_ids)) is (bad_ids == "clamp")


def test_the_last_bag_of_a_padded_batch_ends_with_the_ids_there_are() -> None:
    module = graph("raise")
    for padded_rows in (False, True):
        twin, _ = ready(module, padded_rows)
        assert last_included(module, twin) is padded_rows
        assert not last_included(module, module), "the graph itself is not padded"


def traced(function: Callable, *devices: str, moved: bool = False) -> SimpleNamespace:
    """Stands for an executable: of a weight [4, 4] on the first device, and inputs [5, 4] on the others.

    moved: all values, of a trace on the CPU, are on the GPU afterwards; some cannot be traced there without one.
    """
    with FakeTensorMode(shape_env=ShapeEnv()), torch.no_grad():
        shapes = [(4, 4), *[(5, 4)] * (len(devices) - 1)]
        fakes = [torch.empty(shape, device=device) for shape, device in zip(shapes, devices, strict=True)]
        inputs = [SimpleNamespace(name=f"args[{k}]") for k in range(len(devices) - 1)]
        module = make_fx(function, pre_dispatch=True)(*fakes)
        for node in module.graph.nodes:
            if node.op == "call_function":
                node.meta["place"] = Place("tower", "model.py:7")
            if moved and isinstance(value := node.meta.get("val"), Tensor):
                node.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device="cuda:0")
    return SimpleNamespace(graph=module, capture=SimpleNamespace(state=[None], inputs=inputs))


def reason(function: Callable, *devices: str, moved: bool = False) -> str:
    """Why a function has no captured graphs; "" where it has."""
    with torch.no_grad():
        try:
            suited(traced(function, *(devices or ("cuda:0", "cuda:0")), moved=moved))
        except NoGraph as error:
            return str(error)
    return ""


aten, GPU, CPU = torch.ops.aten, torch.device("cuda:0"), torch.device("cpu")
PLACE = "(tower at model.py:7)"
WAITS = f"waits for the device, because the host needs the values of a tensor {PLACE}"
EFFECT = f"has an effect beyond its result {PLACE}"


@pytest.mark.parametrize(
    "function",
    [
        lambda weight, x: [x @ weight],
        lambda weight, x: [torch.nn.functional.dropout(x @ weight, 0.5, True), torch.randn_like(x)],
        lambda weight, x: [x @ weight * torch.full((), 3.0)],  # a number on the CPU that is always the same
        lambda weight, x: [aten.index_select.default(x @ weight, 0, aten.arange.default(3, device=GPU))],
    ],
)
def test_what_the_device_does_by_itself_is_replayed(function: Callable) -> None:
    assert reason(function) == ""


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda weight, x: [x * (x @ weight).sum().item()], f"item {WAITS}"),
        (lambda weight, x: [aten.nonzero.default(x) + aten.arange.default(2, device=GPU)], f"nonzero {WAITS}"),
        (lambda weight, x: [aten._to_copy.default(aten._to_copy.default(x, device=CPU), device=GPU)], WAITS),
        (lambda weight, x: [(x @ weight).cpu()], WAITS),
        (lambda weight, x: [aten._to_copy.default(torch.rand(4), device=GPU)], f"rand {EFFECT}"),
        (lambda weight, x: [aten._to_copy.default(torch.ones(4), device=GPU)], f"ones is computed on the CPU {PLACE}"),
        (lambda weight, x: [x * aten._to_copy.default(torch.full((), 3.0), device=GPU)], "moves what was computed on"),
        (lambda weight, x: [x @ weight, x.add_(1)], EFFECT),
        (lambda weight, x: [x.bernoulli_(0.5) @ weight], EFFECT),
        (lambda weight, x: [x], "an output shares the memory"),
    ],
)
def test_what_a_replay_would_leave_out_is_named_with_its_line(function: Callable, why: str) -> None:
    assert why in reason(function)


def test_masks_are_counted_by_the_host_unless_one_value_is_filled_in() -> None:
    assert f"index {WAITS}" in reason(lambda weight, x: [(x @ weight)[x > 0]], "cpu", "cpu", moved=True)

    def put(single: bool) -> str:
        return reason(
            lambda w, x: [aten.index_put(x @ w, [x > 0], w[0, 0] if single else w[0])], "cpu", "cpu", moved=True
        )

    assert put(True) == "" and put(False) == f"index_put {WAITS}"


def test_an_input_on_the_cpu_is_moved_and_nothing_else() -> None:
    assert reason(lambda w, x: [aten._to_copy.default(x, device=GPU) @ w], "cuda:0", "cpu") == ""
    used = reason(lambda w, x: [aten._to_copy.default(x, device=GPU) @ w, x.exp()], "cuda:0", "cpu")
    assert "args[0] is on the CPU and is not only moved to the GPU" in used


def test_gradients_and_other_devices_are_told() -> None:
    with pytest.raises(NoGraph, match="gradients are on"):
        suited(traced(lambda w, x: [x @ w], "cuda", "cuda"))
    assert "tensors on cuda:0, cuda:1" in reason(lambda w, x: [w.exp(), x.exp()], "cuda:0", "cuda:1")
    assert is_on_cuda(traced(lambda w, x: [x @ w], "cuda", "cuda")) and not is_on_cuda(
        traced(lambda w, x: [x @ w], "cpu", "cpu")
    )


def test_the_first_call_that_draws_is_found() -> None:
    module = traced(lambda w, x: [torch.nn.functional.dropout(x @ w, 0.5, True)], "cuda", "cuda").graph
    assert draws(module.graph).target is torch.ops.aten.dropout.default
    assert draws(traced(lambda w, x: [x @ w], "cuda", "cuda").graph.graph) is None


def test_copies_of_weights_are_not_renewed_by_a_replay() -> None:
    from fxopt.kernels.compressed.op import OPERATORS

    OPERATORS.load()
    assert "keeps copies of weights" in reason(lambda w, x: [torch.ops.fxopt.compressed_linear(x, w, None, "bf16", 0)])
