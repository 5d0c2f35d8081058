"""Effects of a forward happen as often as in eager, and looking at a model has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt import Config
from fxopt.capture import untouched
from fxopt.runtime import dispatcher_of
from fxopt.torch_internals.seeds import seed_started
from tests.runtime import effects

CONFIGS = {
    "first": Config(tune="off"),
    "full": Config(verify="full", tune="off"),
    "off": Config(verify="off", tune="off"),
}
OPTIMIZED = {"CountedBuffer", "CountedInPlace", "Normed", "EditsInput", "Drops", "HoldsBusy", "Hooked", "Decays"}


@pytest.fixture(autouse=True)
def _globals(monkeypatch: pytest.MonkeyPatch) -> None:
    _reset()


def _reset() -> None:
    effects.CALLS.clear()
    effects.STATS["calls"] = effects.TOTAL = effects.OfTheClass.calls = 0
    effects.SEEN = torch.zeros(2)


def made(kind: type[nn.Module], training: bool) -> nn.Module:
    _reset()
    return kind().train(training)


def called(run: Any, model: nn.Module, batches: tuple[int, ...]) -> list[tuple[Tensor, dict, list[Tensor]]]:
    """Of each call the answer, everything there is after it, and the inputs after it."""
    found = []
    for number, batch in enumerate(batches):
        given = effects.inputs(batch)
        seed_started(number)
        found.append((run(*given).detach().clone(), effects.everything(model), list(given)))
    return found


def differing(before: dict, after: dict) -> list[str]:
    return [name for name in {**before, **after} if repr(before.get(name)) != repr(after.get(name))]


@pytest.mark.parametrize(
    ("level", "grad", "training", "prepared"),
    [  # every pair of settings
        ("first", False, False, False),
        ("first", True, True, True),
        ("full", False, True, False),
        ("full", True, False, True),
        ("off", False, False, True),
        ("off", True, True, False),
    ],
)
@pytest.mark.parametrize("kind", effects.MODELS, ids=lambda kind: kind.__name__)
def test_effects_are_those_of_eager(kind, level, grad, training, prepared, capsys):
    with torch.set_grad_enabled(grad):
        batches = (5, 5, 3) if kind is effects.Normed else (5, 5, 3, 1)
        model = made(kind, training)
        expected = called(model, model, batches)
        printed = capsys.readouterr().out
        model = made(kind, training)
        fast = fxopt.optimize(model, effects.inputs() if prepared else None, CONFIGS[level])
        found = called(fast, model, batches)
        assert capsys.readouterr().out == printed
    for (y, state, inputs), (fast_y, fast_state, fast_inputs) in zip(expected, found, strict=True):
        torch.testing.assert_close(fast_y, y)
        assert not differing(state, fast_state)
        assert all(map(torch.equal, inputs, fast_inputs))
    served = any(entry.executable is not None for entry in dispatcher_of(fast).entries)
    assert served or kind.__name__ not in OPTIMIZED


@pytest.mark.parametrize(
    ("level", "large", "training"),
    [  # every pair of settings
        ("first", untouched.LARGE, False),
        ("first", 0, True),
        ("full", untouched.LARGE, True),
        ("full", 0, False),
        ("off", untouched.LARGE, False),
        ("off", 0, True),
    ],
)
@pytest.mark.parametrize("kind", effects.MODELS, ids=lambda kind: kind.__name__)
def test_looking_leaves_no_trace(kind, level, large, training, monkeypatch, capsys):
    if kind is effects.TargetNumpy and not large:
        pytest.skip("what NumPy writes to large memory no operator sees")
    monkeypatch.setattr(untouched, "LARGE", large)
    model, given = made(kind, training), effects.inputs()
    copies = [(tensor.clone(), tensor._version) for tensor in given]
    before, objects = effects.everything(model), effects.identities(model)
    fxopt.optimize(model, given, CONFIGS[level])
    assert not differing(before, effects.everything(model))
    assert not differing(objects, effects.identities(model))
    assert all(torch.equal(t, copy) and t._version == version for t, (copy, version) in zip(given, copies, strict=True))
    assert not capsys.readouterr().out


def test_a_look_is_seen_by_no_other_thread():
    """Memory is written in copies, not put back afterwards."""
    model, seen = effects.TargetByData(), []
    weight = model.target.weight.detach().clone()

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            seen.append(torch.equal(model.target.weight.detach(), weight))
            return result

    look = untouched.Look()
    copy = look.copy(model).root
    with Watching():
        untouched.looked(look, copy, *look.own_inputs(effects.inputs()))
    assert seen and all(seen)
    assert any(look.writes(parameter) for parameter in copy.parameters())
