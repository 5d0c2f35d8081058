"""The tracer of torch still finds a proxy for a tensor, and its mode still records operators before autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import get_cached_ops

from fxopt.torch_internals.tracing import (
    SYMBOLIC,
    LazyGraphModule,
    call_proxy,
    disable_autocast_cache,
    disable_proxy_modes_tracing,
    enable_python_dispatcher,
    make_fx,
    nodes_behind,
    number_proxy,
    proxy_of,
    record,
    reset_cached_ops,
    stands_for,
)

aten = torch.ops.aten


def test_a_recorded_tensor_has_a_proxy(tracer: Any, x: Tensor) -> None:
    proxy = proxy_of(x, tracer)
    assert proxy is not None and proxy.node.meta["val"] is not None, (
        "track_tensor_tree no longer keeps a proxy and meta['val']: fxopt/capture/trace.py makes its placeholders so"
    )
    assert proxy_of(torch.ones(1), tracer) is None, (
        "get_proxy_slot has no default any more: fxopt/capture tells constants from traced tensors by None"
    )


@pytest.mark.usefixtures("recording")
def test_operators_are_recorded_before_autograd(tracer: Any, x: Tensor) -> None:
    y = torch.square(x)
    found = [node.target for node in tracer.graph.nodes if node.op == "call_function"]
    assert found == [aten.square.default], (
        f"ProxyTorchDispatchMode(pre_dispatch=True) recorded {found}, not square: fxopt/patterns looks for such calls"
    )
    with disable_proxy_modes_tracing():
        torch.relu(y)
    assert len(tracer.graph.nodes) == 2, (
        "disable_proxy_modes_tracing no longer stops the recording: fxopt/capture makes twins and leaf outputs in it"
    )


@pytest.mark.usefixtures("recording")
def test_the_mode_records_what_was_called_before(tracer: Any, x: Tensor) -> None:
    torch.square(x)
    reset_cached_ops()
    assert not get_cached_ops(), "reset_cached_ops keeps some: fxopt/capture/trace.py makes it short to enter the mode"
    with disable_proxy_modes_tracing():
        torch.square(x)
    torch.square(x)
    assert len(tracer.graph.nodes) == 3


def test_sizes_have_proxies(tracer: Any, x: Tensor) -> None:
    assert isinstance(x.shape[0], SYMBOLIC) and number_proxy(x.shape[0], tracer).node.target is aten.sym_size.int, (
        "get_proxy_slot gives no sym_size node for a SymInt: fxopt/capture/trace.py returns sizes so"
    )


@pytest.mark.usefixtures("recording")
def test_a_twin_stands_for_a_tensor(tracer: Any, x: Tensor) -> None:
    with disable_proxy_modes_tracing():
        twin = aten.alias.default(x)
    value = tracer.graph.find_nodes(op="placeholder")[0].meta["val"]
    stands_for(twin, x, tracer)
    proxies = [proxy_of(each, tracer) for each in (twin, x)]
    assert proxies[0] is not None and proxies[0] is proxies[1] and proxies[0].node.meta["val"] is value, (
        "set_proxy_slot no longer shares a proxy: x.contiguous() in fxopt/capture/trace.py reads a copy"
    )


def test_a_call_is_named_as_torch_names_it(tracer: Any, x: Tensor) -> None:
    proxy = call_proxy(aten.mul.Tensor, (x, 2.0), tracer)
    record(x, proxy, tracer)
    assert (proxy.node.name, proxy.node.args[1]) == ("mul", 2.0) and proxy.node.args[0].op == "placeholder", (
        "create_proxy or _target_to_str changed: fxopt/capture/forms.py writes calls of known forms so"
    )


def test_nodes_behind_a_node(tracer: Any, x: Tensor) -> None:
    first = tracer.graph.find_nodes(op="placeholder")[0]
    call_proxy(aten.mul.Tensor, (x, 2.0), tracer)
    names = [node.name for node in nodes_behind(first, tracer.graph)], len([*nodes_behind(None, tracer.graph)])
    assert names == (["mul"], 2), "Graph keeps its nodes otherwise than in a ring from _root: fxopt/capture/proofs.py"


def test_matmul_of_symbolic_sizes_is_decomposed(fake_mode: Any, x: Tensor) -> None:
    with fake_mode, enable_python_dispatcher():
        assert (x @ x.t()).shape[0] == x.shape[0], "enable_python_dispatcher: fake results in a trace come from it"


def test_the_autocast_cache_is_off_for_a_while() -> None:
    with disable_autocast_cache():
        inside = torch.is_autocast_cache_enabled()
    assert (inside, torch.is_autocast_cache_enabled()) == (False, True), (
        "disable_autocast_cache: fxopt/capture/trace.py"
    )


def test_make_fx_records_before_autograd() -> None:
    traced = make_fx(torch.nn.functional.linear, pre_dispatch=True)(torch.ones(2, 3), torch.ones(4, 3))
    assert aten.linear.default in [node.target for node in traced.graph.nodes], (
        "make_fx(pre_dispatch=True): fxopt/patterns/traced.py writes its patterns with it"
    )


def test_a_lazy_module_compiles_its_forward_when_it_runs() -> None:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
    module = LazyGraphModule(torch.nn.Module(), graph)
    x = torch.ones(2)

    assert module._needs_recompile(), "torch's _LazyGraphModule compiles at once; captures take longer (recorded.py)"
    torch.testing.assert_close(module(x), -x)
    LazyGraphModule.force_recompile(module)
    assert not module._needs_recompile(), "force_recompile leaves the first call of a graph to compile (direct.py)"
