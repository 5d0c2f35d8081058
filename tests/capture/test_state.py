"""Parameters and buffers are inputs of the graph; the module under capture is never written to."""

from __future__ import annotations

import copy
import threading

import torch
from torch import nn

from fxopt.capture import capture
from fxopt.capture.effects import stores_of
from fxopt.findings import Place


def test_only_used_state_once(check):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3)
            self.unused = nn.Linear(2, 2)
            self.out = nn.Linear(3, 5, bias=False)
            self.out.weight = self.table.weight
            self.register_buffer("scale", torch.rand(3))

        def forward(self, ids):
            return self.out(self.table(ids) * self.scale)

    model = Tied()
    found = capture(model, (torch.tensor([1, 2]),))
    assert sorted(map(str, found.state)) == ["scale", "table.weight"]
    check(found, model, torch.tensor([0, 4, 3]))
    nn.init.ones_(model.table.weight)
    check(found, model, torch.tensor([0, 4, 3]))


def test_parameters_behind_plain_python_are_state(check):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
            self.registered = nn.ModuleList(self.layers)
            self.weights = {"w": nn.Parameter(torch.rand(3)), "again": None}
            self.weights["again"] = self.registered[0].weight
            holder = type("Holder", (), {})()
            holder.bias = self.registered[1].bias
            self.holder = holder

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).relu()
            return x * self.weights["w"] + self.weights["again"].sum() + self.holder.bias

    model = Hidden()
    found = capture(model, (torch.rand(4, 3),))
    assert {str(s) for s in found.state} == {f"registered.{i}.{n}" for i in (0, 1) for n in ("weight", "bias")}
    constants = [n for n in found.graph.graph.nodes if n.op == "get_attr"]
    assert next(getattr(found.graph, n.target) for n in constants) is model.weights["w"]
    check(found, model, torch.rand(2, 3))


def test_constants_stay_out_of_the_state_dict(check):
    class Constants(nn.Module):
        def __init__(self):
            super().__init__()
            self.offsets = torch.tensor([0, 5])

        def forward(self, ids):
            return ids + self.offsets + torch.tensor([1, 2]), torch.ones(2), torch.arange(ids.shape[0])

    model = Constants()
    found = capture(model, (torch.randint(0, 5, (4, 2)),))
    assert not found.graph.state_dict() and not list(found.graph.buffers()) and not list(found.graph.parameters())
    assert any(value is model.offsets for value in vars(found.graph).values())
    check(found, model, torch.randint(0, 5, (3, 2)))


def test_training_mode_updates_and_gradients(check):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 1))
    twin = copy.deepcopy(model)
    found = capture(model, (torch.rand(6, 4),))
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, twin.state_dict()[name])
    x = torch.rand(9, 4)
    torch.manual_seed(1)
    twin(x).sum().backward()
    torch.manual_seed(1)
    (out,) = found.graph(*[slot.read(model) for slot in found.state], x)
    out.sum().backward()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, twin.state_dict()[name])
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_in_place_operators_survive(check):
    class InPlace(nn.Module):
        def forward(self, x):
            y = x * 2
            y[:, 0].add_(1)
            y.relu_()
            return y

    found = capture(InPlace(), (torch.rand(4, 3),))
    found.graph.graph.eliminate_dead_code()
    found.graph.recompile()
    check(found, InPlace(), torch.randn(5, 3))


def test_reassigned_buffer_is_stored(check):
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.mean = self.mean * 0.9 + x.mean(0) * 0.1
            return x - self.mean

    model, twin = Average(), Average()
    found = capture(model, (torch.rand(4, 3),))
    found.graph(*[slot.read(model) for slot in found.state], torch.rand(5, 3))
    assert torch.equal(model.mean, torch.zeros(3)), "nothing is stored before it is released"
    for store in stores_of(found.graph):
        store.release(store.module)
    for _ in range(2):
        x = torch.rand(5, 3)
        (got,) = found.graph(*[slot.read(model) for slot in found.state], x)
        torch.testing.assert_close(got, twin(x))
        torch.testing.assert_close(model.mean, twin.mean)


def test_places(check):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(x) + 1

    model = nn.Sequential(Inner(), nn.ReLU())
    found = capture(model, (torch.rand(4, 3),))
    places = {str(n.target): n.meta["place"] for n in found.graph.graph.nodes if n.op == "call_function"}
    line = Inner.forward.__code__.co_firstlineno + 1
    assert places["aten.linear.default"] == Place("0.linear", f"test_state.py:{line}")
    assert places["aten.add.Tensor"] == Place("0", f"test_state.py:{line}")
    assert places["aten.relu.default"] == Place("1", ""), "no frame of this test or of fxopt is the model's"
    for node in found.graph.graph.nodes:
        assert "val" in node.meta or node.op == "output"
    kinds = [("state" in n.meta, "input" in n.meta) for n in found.graph.graph.nodes if n.op == "placeholder"]
    assert kinds == [(True, False)] * 2 + [(False, True)]


def test_eight_threads_serve_the_model_while_it_is_captured():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(20)])
    x = torch.rand(4, 8)
    with torch.no_grad():
        want = model(x)
    stop, wrong = threading.Event(), []

    def serve():
        while not stop.is_set():
            try:
                with torch.no_grad():
                    torch.testing.assert_close(model(x), want)
            except BaseException as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=serve) for _ in range(6)]
    threads += [threading.Thread(target=lambda: capture(model, (x,))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        capture(model, (x,))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


class Nibbles(torch.Tensor):
    """A tensor of another kind, as TorchRec has them: it knows few operators."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return torch.empty(3).as_subclass(Nibbles)
        raise NotImplementedError(func)


class Holder(nn.Module):
    """Codes that are read elsewhere, as those of TorchRec's quantized collections."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.empty(3).as_subclass(Nibbles))


def test_many_modules_may_hold_tensors_of_other_kinds(check):
    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.holders = nn.ModuleList(Holder() for _ in range(20))
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return self.linear(x)

    model = Held()
    found = capture(model, (torch.rand(4, 2),))
    assert {leaf.reason for leaf in found.leaves} <= {
        f"holders.{i}.codes: expected a dense tensor, found Nibbles" for i in range(20)
    }
    check(found, model, torch.rand(3, 2))
