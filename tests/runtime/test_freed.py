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
            x = x * 2 if float(x.sum()) > 0 else x
        if self.stop == "array":
            x = x + float(x.detach().numpy()[0, 0])
        if self.stop == "print":
            print(end="")
        if self.stop == "caught":
            try:
                x = x * 2 if float(x.sum()) > 0 else x
            except RuntimeError as error:
                self.error = error
        return self.linear(self.inner(x))


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2 if float(x.sum()) > 0 else x


class Pieces(nn.Module):
    """Opaque, with a part that is optimized by itself."""

    def __init__(self):
        super().__init__()
        self.part, self.last = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12)), Branching(12, 12)

    def forward(self, x):
        return self.last(self.part(x)) if float(x.sum()) > 0 else x


class Storing(nn.Linear):
    def forward(self, x):
        self.ready, self.seen = True, x
        return super().forward(x)


class Length(nn.Module):
    def forward(self, x):
        return x * {len(x): 2}[len(x)]


def ids(rows: int = 3) -> torch.Tensor:
    return torch.randint(0, 50, (rows, 4))


def failing(fast, ids) -> None:
    with contextlib.suppress(RuntimeError):  # pytest.raises keeps the error, and by that its frames
        fast(ids)
        pytest.fail("no error")


def hooked(model: Ranker) -> Ranker:
    for module in (model, model.inner):
        module.register_forward_hook(lambda *_: None)
    return model


MODELS = {
    "captured": Ranker,
    "with an opaque part": lambda: Ranker(inner=Branching(12, 12)),
    "with pieces in an opaque part": lambda: Ranker(inner=Pieces()),
    "that assigns attributes": lambda: Ranker(inner=Storing(12, 12)),
    "captured at the second try": lambda: Ranker(inner=Length()),
    "with hooks": lambda: hooked(Ranker(inner=nn.Linear(12, 12))),
    **{f"stopped by a {stop}": lambda stop=stop: Ranker(stop) for stop in ("branch", "array", "print", "caught")},
}
USES = {
    "called": lambda fast: [fast(ids(rows)) for rows in (3, 2, 1)],
    "trained": lambda fast: fast.train()(ids()).sum().backward(),
    "failing": lambda fast: [failing(fast, ids() + 50), fast(ids()), failing(fast, ids() + 50)],
    "refusing at first": lambda fast: [failing(fast, ids().float()), fast(ids())],
    "compiled": lambda fast: torch.compile(fast, backend="eager")(ids()),
    "copied": lambda fast: fast(ids()) + fxopt.optimize(fast)(ids()),
    "reported": lambda fast: (fast(ids()), str(fxopt.report(fast))),
}


@pytest.fixture
def uncollected():
    fxopt.optimize(Ranker())(ids())  # the first optimization imports modules, whose frames keep its caller's
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


def stays_eager() -> None:
    """A capture that fails, and the call."""
    fxopt.optimize(Ranker("branch"))(ids())


def captured_around_a_leaf() -> None:
    fxopt.optimize(MODELS["with an opaque part"](), ids())


def served_by_batches():
    """Batches of a source that fails at every second one; the errors come along."""
    for number in range(4):
        try:
            if number % 2:
                raise KeyError(number)
            yield number
        except KeyError as error:
            yield error


@pytest.mark.parametrize("use", [stays_eager, captured_around_a_leaf])
def test_an_error_that_the_caller_handles_stays_whole(use):
    def failing_step(batch):
        raise KeyError(batch)

    with pytest.raises(KeyError) as raised:
        try:
            failing_step("a batch")
        except KeyError:
            use()
            raise
        finally:
            use()
    frames = {entry.frame.code.raw.co_name: entry.frame.f_locals for entry in raised.traceback}
    assert frames["failing_step"]["batch"] == "a batch"


@pytest.mark.parametrize("use", [stays_eager, captured_around_a_leaf])
def test_what_the_caller_has_suspended_goes_on(use):
    seen = []
    for item in served_by_batches():
        try:
            if isinstance(item, KeyError):
                raise item
        except KeyError:
            use()
        seen.append(item)
    assert len(seen) == 4
