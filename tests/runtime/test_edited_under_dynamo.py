"""Code that torch.compile has made around an optimized model, and what is edited between its calls, or within them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import fxopt

Edit = Callable[[nn.Module], object]


class Columns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(32)
        self.top = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))
        self.more = nn.ModuleDict({"a": nn.Identity()})
        self.register_buffer("vocabulary", torch.zeros(10))

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids % self.vocabulary.numel()
        x = self.top(self.norm(torch.cat([table(ids[:, k]) for k, table in enumerate(self.tables)], 1)))
        for name in self.more:
            x = self.more[name](x)
        return x * self.scale if hasattr(self, "scale") else x


class Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs) * 2 + 1


def table(model: nn.Module, rows: int = 50) -> None:
    model.tables[1].weight = nn.Parameter(torch.randn(rows, 8))


def tie(model: nn.Module) -> None:
    model.tables[1].weight = model.tables[0].weight


def silence(model: nn.Module) -> None:
    model.top[1].forward = lambda x: x * 0


def end(model: nn.Module) -> None:
    model.top.append(nn.Sigmoid())


def put(model: nn.Module) -> None:
    model.more["b"] = nn.Linear(1, 1)


def vocabulary(rows: int) -> Edit:
    return lambda model: setattr(model, "vocabulary", torch.zeros(rows))


def swap(model: nn.Module) -> None:
    model.tables[0], model.tables[1] = model.tables[1], model.tables[0]


EDITS: dict[str, Sequence[Edit]] = {
    "tied": (tie, table, tie, table),
    "rows": (lambda m: table(m, 80), table, lambda m: table(m, 80)),
    "dtypes": (nn.Module.double, nn.Module.float, nn.Module.double, nn.Module.float),
    "a forward of its own": (silence,),
    "a layer more": (end,),
    "a layer by another name": (put,),
    "a buffer that only tells its size": tuple(map(vocabulary, (20, 10, 30))),
    "a new attribute": (lambda m: setattr(m, "scale", 3.0), lambda m: setattr(m, "scale", 5.0)),
    "modes": (nn.Module.train, nn.Module.eval, nn.Module.train),
    "places": (swap, swap),
    "another layer": (lambda m: m.top.__setitem__(1, nn.Tanh()),),
    "another class": (lambda m: setattr(m.top[1], "__class__", nn.Sigmoid),),
    "a bias": (
        lambda m: setattr(m.top[0], "bias", None),
        lambda m: setattr(m.top[0], "bias", nn.Parameter(torch.ones(16))),
    ),
}


@pytest.fixture(autouse=True)
def _compiled_anew():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("starts", ["as it is", *list(EDITS)[:2]])
@pytest.mark.parametrize("edits", EDITS)
def test_edits_between_calls_are_seen(edits: str, starts: str, gradients: bool) -> None:
    plain = Columns().eval()
    if starts != "as it is":
        EDITS[starts][0](plain)
    model = copy.deepcopy(plain)
    ids, compiled = torch.randint(0, 50, (8, 4)), torch.compile(Around(fxopt.optimize(model)), backend="eager")
    for number, edit in enumerate((lambda model: None, *EDITS[edits])):
        for each in (plain, model):
            torch.manual_seed(number)
            edit(each)
        with torch.set_grad_enabled(gradients):
            torch.testing.assert_close(compiled(ids), Around(plain)(ids), rtol=1e-4, atol=1e-5)


def evaluated(model: nn.Module, ids: Tensor) -> Tensor:
    model.eval()
    return model(ids) * 2


def in_turns(model: nn.Module, ids: Tensor) -> Tensor:
    model.train()
    first = model(ids)
    model.eval()
    return first + model(ids)


def scaled(model: nn.Module, ids: Tensor) -> Tensor:
    model.scale = 3
    return model(ids) + 1


def autocast_first(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        first = model(ids)
    return model(ids) + first.float()


def autocast_last(model: nn.Module, ids: Tensor) -> Tensor:
    first = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        return model(ids).float() + first


def of_two_dtypes(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids) + model(ids.int())


def without_gradients_first(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        first = model(ids)
    return first + model(ids)


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize(
    "code", [evaluated, in_turns, scaled, autocast_first, autocast_last, of_two_dtypes, without_gradients_first]
)
def test_what_the_compiled_code_does_itself_is_seen(code: Callable, warm: bool) -> None:
    ids, plain = torch.randint(0, 50, (8, 4)), Columns()
    model = copy.deepcopy(plain)
    fast = fxopt.optimize(model)
    if warm:
        code(fast, ids), model.train()
        model.load_state_dict(plain.state_dict())
        vars(model).pop("scale", None)
    compiled = torch.compile(code, backend="eager")
    for _ in range(2):
        expected = code(plain, ids)
        torch.testing.assert_close(compiled(fast, ids), expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean, rtol=2e-2, atol=1e-3)


class Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return self.query(q) if q is k else self.query(q) + self.key(k)


class Nested(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, both: dict[str, Tensor]) -> Tensor:
        return self.model(both["q"] * 1, both["k"] * 1) if "twice" in both else self.model(both["q"], both["k"])


@pytest.mark.parametrize("nested", [True, False])
def test_which_inputs_are_one_tensor_is_seen(nested: bool) -> None:
    plain = Asking()
    fast, (a, b) = fxopt.optimize(copy.deepcopy(plain)), torch.randn(2, 4, 8)
    fast.load_state_dict(plain.state_dict())
    for pair in ((a, b), (a, a)):
        fast(*pair)
    model = Nested(fast) if nested else fast
    compiled = torch.compile(Around(model), backend="eager", fullgraph=True)
    for q, k in ((a, b), (a, a), (b, a), (b, b)):
        expected = plain(q, k) * 2 + 1
        torch.testing.assert_close(compiled({"q": q, "k": k}) if nested else compiled(q, k), expected)
