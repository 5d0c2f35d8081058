"""A model is freed with the last name for it, as in eager: the next one need not wait for Python's collector."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from torch import nn

import fxopt
from fxopt.torch_internals.shape_env import TraceShapeEnv


class Ranker(nn.Module):
    """Three columns and a layer, and what keeps a model eager."""

    def __init__(self, stop: str = "", inner: nn.Module | None = None):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(50, 4, mode="sum") for _ in range(3))
        self.linear, self.inner, self.stop = nn.Linear(12, 1), inner or nn.Identity(), stop

    def forward(self, ids):
        x = torch.cat([table(ids[:, k : k + 2]) for k, table in enumerate(self.tables)], 1)
        if self.stop == "branch":
            x = x * 2 if x.sum() > 0 else x
        if self.stop == "array":
            x = x + float(x.detach().numpy()[0, 0])
        if self.stop == "print":
            print(end="")
        if self.stop == "caught":
            try:
                x = x * 2 if x.sum() > 0 else x
            except RuntimeError as error:
                self.error = error
        return self.linear(self.inner(x))


class Branching(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


def ids(rows: int = 3) -> torch.Tensor:
    return torch.randint(0, 50, (rows, 4))


def failing(fast, ids) -> None:
    with contextlib.suppress(RuntimeError):  # pytest.raises keeps the error, and by that its frames
        fast(ids)
        pytest.fail("no error")


MODELS = {
    "captured": Ranker,
    "with an opaque part": lambda: Ranker(inner=Branching()),
    **{f"stopped by a {stop}": lambda stop=stop: Ranker(stop) for stop in ("branch", "array", "print", "caught")},
}
USES = {
    "called": lambda fast: [fast(ids(rows)) for rows in (3, 2, 1)],
    "trained": lambda fast: fast.train()(ids()).sum().backward(),
    "failing": lambda fast: [failing(fast, ids() + 50), fast(ids()), failing(fast, ids() + 50)],
    "copied": lambda fast: fast(ids()) + fxopt.optimize(fast)(ids()),
    "reported": lambda fast: (fast(ids()), str(fxopt.report(fast))),
}


@pytest.fixture
def uncollected():
    fxopt.optimize(Ranker())(ids())  # what is imported by the first optimization keeps the frames of who asked for it
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", MODELS)
def test_without_a_collection(uncollected, name, use):
    model = MODELS[name]()
    fast = fxopt.optimize(model)
    USES[use](fast)
    held = [weakref.ref(each) for each in (model, fast, *model.parameters())]
    del model, fast
    assert [each() for each in held] == [None] * len(held)


def test_nothing_that_torch_keeps_of_a_trace_holds_it(monkeypatch):
    made, init = [], TraceShapeEnv.__init__
    monkeypatch.setattr(TraceShapeEnv, "__init__", lambda env: (made.append(weakref.ref(env)), init(env))[1])
    for model in MODELS.values():
        fxopt.optimize(model(), ids())
    for _ in range(2):
        gc.collect()
    assert len(made) >= len(MODELS)
    assert [each() for each in made] == [None] * len(made)
