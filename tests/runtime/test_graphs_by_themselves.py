"""Plain calls of an optimized model on a GPU, which replay captured graphs where that is right and faster."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.runtime import cuda_graphs, dispatcher_of, graph_memory, tail
from fxopt.tune import clock

pytestmark = pytest.mark.gpu
ROWS = 50


class Tower(nn.Module):
    """Lookups and a few layers: bound by their launches."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, 8) for _ in range(6))
        self.top = nn.Sequential(nn.Linear(52, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 1))
        self.square = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        found = [table(ids[:, k]) for k, table in enumerate(self.tables)]
        return self.top(torch.cat([x @ self.square, *found], 1))


def inputs(batch: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 4, device=device), torch.randint(0, ROWS, (batch, 6), device=device)


def told(optimized: nn.Module) -> str:
    return "\n".join(findings.graphs for findings in dispatcher_of(optimized).findings)


def count(optimized: nn.Module) -> int:
    """Of captured graphs, as the report tells."""
    return sum(map(int, re.findall(r"(\d+) graphs? holds?", told(optimized))))


def close(found: Tensor | list[Tensor], expected: Tensor | list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _replays_are_faster(monkeypatch):
    """Whatever else the machine does."""
    monkeypatch.setattr(cuda_graphs, "fastest", lambda contenders, *patience, **rounds: [2.0, 1.0])


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    model = Tower().cuda().eval()
    return model, fxopt.optimize(model)


def served(model: nn.Module, optimized: nn.Module, batches: tuple[int, ...] = (32, 32, 32)) -> None:
    for batch in batches:
        call = inputs(batch)
        close(optimized(*call), model(*call))


def test_the_third_call_of_a_size_is_a_replay(pair):
    model, optimized = pair
    served(model, optimized, (32, 30, 29, 1, 1, 1, 300, 257, 280, 0, 31))
    assert count(optimized) == 3, told(optimized)
    assert "calls run as they are" not in told(optimized)
    assert 0 < int(re.search(r"graphs hold (\d+) MB", told(optimized))[1]) < 1000


def test_outputs_are_the_callers_own(pair):
    model, optimized = pair
    served(model, optimized)
    first, second = inputs(32), inputs(32)
    one, other = optimized(*first), optimized(*second)
    close(one, model(*first)), close(other, model(*second))
    one.zero_()
    close(optimized(*first), model(*first))


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).relu().clone()


def test_results_of_transposed_inputs_lie_as_eagers():
    model = Turned().cuda()
    optimized = fxopt.optimize(model)
    for call in range(5):
        x = torch.randn(4, 4, device="cuda")
        assert optimized(x.t()).stride() == model(x.t()).stride() == (4, 1), call
        close(optimized(x), model(x))
    assert count(optimized) == 1 and "transposed inputs" in told(optimized)


def test_results_that_always_lie_alike_are_replayed_for_transposed_inputs_too(pair):
    model, optimized = pair
    for _ in range(4):
        dense, ids = inputs(32)
        call = dense.t().contiguous().t(), ids
        close(optimized(*call), model(*call))
    assert count(optimized) == 1 and "transposed inputs" not in told(optimized)


class Wide(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0] * 2


def test_what_a_replay_makes_slower_runs_as_it_is(monkeypatch):
    monkeypatch.setattr(cuda_graphs, "fastest", clock.fastest)
    model = Wide().cuda()
    optimized = fxopt.optimize(model)
    x = torch.randn(8192, 4096, device="cuda")  # 128 MB to copy, for 32 kB that are read
    for _ in range(4):
        assert torch.equal(optimized(x), model(x))
    assert count(optimized) == 0 and "calls run as they are: a replay took" in told(optimized)
    always = fxopt.optimize(model, config=fxopt.Config(cuda_graphs=True))
    for _ in range(4):
        assert torch.equal(always(x), model(x))
    assert count(always) == 1


def test_memory_is_bounded(monkeypatch):
    model = Tower().cuda().eval()
    optimized = fxopt.optimize(model, config=fxopt.Config(cuda_graphs=True))
    monkeypatch.setattr(graph_memory, "SHARE", 1 << 20)
    served(model, optimized)
    assert count(optimized) == 0 and "graphs would hold" in told(optimized)
    monkeypatch.undo()
    served(model, optimized, (64, 64, 64))
    assert count(optimized) == 1


def test_no_memory_is_left_behind():
    reserved = []
    for _ in range(3):  # cuBLAS keeps a workspace for the stream that captures, which the next model takes over
        model = Tower().cuda().eval()
        optimized = fxopt.optimize(model, config=fxopt.Config(cuda_graphs=True))
        served(model, optimized)
        assert count(optimized) == 1
        del model, optimized
        gc.collect(), torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[2] <= reserved[0]


class Products(nn.Module):
    """Long sums, which cuBLAS adds up in parts: it keeps them in memory of its own."""

    SIZES = ((64, 1 << 15, 32), (512, 5200, 256), (2048, 5200, 128))

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(k, n) / k**0.5 for _, k, n in self.SIZES)

    def forward(self, *x: Tensor) -> list[Tensor]:
        return [each @ weight for each, weight in zip(x, self.weights, strict=True)]


def test_matrix_products_keep_the_memory_they_work_in():
    """torch.compile(mode="reduce-overhead") frees what cuBLAS works in, and graphs know its address."""
    model = Products().cuda().eval()
    x = [torch.randn(m, k, device="cuda") for m, k, _ in Products.SIZES]
    expected = model(*x)
    optimized = fxopt.optimize(model, config=fxopt.Config(cuda_graphs=True))
    for _ in range(4):
        close(optimized(*x), expected)
    assert count(optimized) == 1
    torch._C._cuda_clearCublasWorkspaces()
    others = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(64)]
    for _ in range(3):
        close(optimized(*x), expected)
    assert all(bool((each == 7).all()) for each in others)
    del others
    gc.collect(), torch.cuda.empty_cache()
    close(optimized(*x), expected)


def test_weights_that_moved_or_lie_otherwise(pair):
    model, optimized = pair
    served(model, optimized)
    model.square.data = model.square.data.t()
    served(model, optimized)
    model.square.data = torch.randn(4, 4, device="cuda")
    served(model, optimized)
    model.load_state_dict({name: tensor + 0.1 for name, tensor in model.state_dict().items()})
    served(model, optimized)
    model.square.data.mul_(2)
    served(model, optimized)
    assert count(optimized) == 1, told(optimized)
    model.cpu().cuda()
    served(model, optimized)


def test_autocast_and_inference_mode(pair):
    model, optimized = pair
    for _ in range(4):
        call = inputs(32)
        with torch.autocast("cuda", torch.bfloat16):
            torch.testing.assert_close(optimized(*call), model(*call), rtol=3e-2, atol=3e-2)
        with torch.inference_mode():
            inside = optimized(*call)
            close(inside, model(*call))
        assert inside.is_inference()
        outside = optimized(*call)
        assert not outside.is_inference()
        close(outside.add_(1), model(*call) + 1)
    assert count(optimized) >= 2, told(optimized)


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_graphs_of_their_own(pair, twin: Callable):
    model, optimized = pair
    served(model, optimized)
    other = twin(optimized)
    model.square.add_(1)
    assert count(other) == 0
    served(other._fxopt.original, other)
    assert count(other) == 1
    served(model, optimized)


def test_a_forked_child_raises_as_eager_does(pair):
    model, optimized = pair
    served(model, optimized)
    call = inputs(32)
    child = os.fork()
    if child == 0:
        try:
            optimized(*call)
        except RuntimeError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    served(model, optimized)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_the_second_device():
    model = Tower().to("cuda:1").eval()
    optimized = fxopt.optimize(model)
    for batch in (32, 31, 30, 5, 5, 5):
        call = inputs(batch, "cuda:1")
        found = optimized(*call)
        assert found.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
        close(found, model(*call))
    assert count(optimized) == 2, told(optimized)


class Drawing(nn.Module):
    """Numbers of each kind: a layer's dropout, and starting values as capsule networks draw them."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower(dropout=0.5)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.tower(x, ids) + torch.randn(x.shape[0], 1, device=x.device)


def test_random_numbers_are_those_of_the_plain_call():
    model = Drawing().cuda().train()
    plain = fxopt.optimize(model, config=fxopt.Config(cuda_graphs=False))
    optimized = fxopt.optimize(model)
    results = []
    for one in (plain, optimized):
        one(*inputs(32)), one(*inputs(32))
        torch.manual_seed(5)
        calls = [inputs(batch) for batch in (32, 32, 32, 32, 7, 7, 7, 32)]
        found = []
        for call in calls:
            found += [one(*call), torch.rand(3, device="cuda")]
        results.append((found, torch.cuda.get_rng_state()))
    assert count(optimized) == 2 and count(plain) == 0, told(optimized)
    for expected, found in zip(results[0][0], results[1][0], strict=True):
        close(found, expected)
    assert torch.equal(results[0][1], results[1][1])
    call = inputs(32)
    assert not torch.equal(optimized(*call), optimized(*call)), "each replay draws new numbers"
    with torch.inference_mode():
        assert not torch.equal(optimized(*call), optimized(*call))
    assert not torch.equal(optimized(*call), optimized(*call))


class Asks(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.layer(x))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (lambda x: x[x > 0].sum(), "waits for the device"),
        (lambda x: x.nonzero().sum() + x.sum(), "waits for the device"),
        (lambda x: x.cpu(), "waits for the device"),
        (lambda x: x.add_(1) * x.mean().cpu().to(x.device), "waits for the device"),
    ],
)
def test_what_waits_for_the_device_runs_as_it_is_and_is_named(how, why):
    model = Asks(how).cuda()
    optimized = fxopt.optimize(model)
    for _ in range(4):
        x = torch.randn(6, 4, device="cuda")
        close(optimized(x), model(x))
    assert count(optimized) == 0 and f"{why}, because the host needs" in told(optimized)
    assert "test_graphs_by_themselves.py:" in told(optimized)


class Spread(nn.Module):
    """Of the nodes of a graph to their neighbours, as LightGCN does."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.layer = torch.eye(6).to_sparse_coo().cuda(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.graph, self.layer(x))


def test_sparse_products_run_as_they_are():
    model = Spread().cuda()
    optimized = fxopt.optimize(model)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(6, 4, device="cuda")
            close(optimized(x), model(x))
    assert count(optimized) == 0 and "reads a sparse tensor" in told(optimized)


def test_gradients_run_as_they_are(pair):
    model, optimized = pair
    with torch.enable_grad():
        for _ in range(3):
            optimized(*inputs(8)).sum().backward()
    assert model.square.grad is not None and "gradients are on" in told(optimized)


def test_the_users_own_capture_holds_the_call_itself(pair):
    model, optimized = pair
    served(model, optimized)
    call, graph = inputs(32), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = optimized(*call)
    call[0].normal_()
    graph.replay()
    close(found, model(*call))
    served(model, optimized)


def test_streams_come_and_go(pair):
    model, optimized = pair
    served(model, optimized)
    results = []
    for turn in range(12):
        stream = torch.cuda.Stream() if turn % 3 else torch.cuda.default_stream()
        call = inputs(32)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results.append((call, optimized(*call)))
    torch.cuda.synchronize()
    for call, found in results:
        close(found, model(*call))


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower, self.items = Tower(), nn.Parameter(torch.randn(20_000, 1))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        users = self.tower(x, ids)
        return users, nn.functional.linear(users, self.items).relu()


@pytest.mark.parametrize("least", [0, 1 << 40])
def test_scores_of_many_items_are_computed_behind_the_replay(monkeypatch, least: int) -> None:
    """Or copied, where they are few in all."""
    monkeypatch.setattr(tail, "_LARGE", least)
    model = Scorer().cuda().eval()
    fast = fxopt.optimize(model, inputs(48))
    for batch in (48, 48, 48, 40, 48, 33):
        given = inputs(batch)
        for found, expected in zip(fast(*given), model(*given), strict=True):
            close(found, expected)
    assert count(fast) == 1
    kept = fast(*inputs(48))[1]
    values = kept.clone()
    model.items.mul_(2)
    given = inputs(48)
    close(fast(*given)[1], model(*given)[1])
    model.items.data = torch.randn_like(model.items)
    close(fast(*given)[1], model(*given)[1])
    assert torch.equal(kept, values)
