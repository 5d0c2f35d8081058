"""The harness notices what is planted, shrinks it, and outlives a worker that dies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt.config import Config
from tests.fuzz import check, driver, shrink
from tests.fuzz.programs import Input, Program, Sizes

PROGRAM = Program(
    setup=("self.l = nn.Linear(4, 4)", 'self.register_buffer("b", torch.zeros(1))'),
    inputs=(Input("x", "torch.randn(B, 4)", grad=True),),
    lines=("v1 = self.l(x)", "v2 = torch.relu(v1)", "v3 = v2.unsqueeze(1)", "v4 = v3.flatten(1)"),
    outputs=("v4", "v1"),
    grad=True,
)


class Planted(nn.Module):
    """A model with an error in its forward."""

    def __init__(self, model: nn.Module, wrong: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__ = model.__dict__
        object.__setattr__(self, "original", type(model).forward)
        object.__setattr__(self, "wrong", wrong)
        object.__setattr__(self, "_fxopt", SimpleNamespace(entries=()))

    def forward(self, *args: Tensor) -> Any:
        return self.wrong(self, args, lambda *given: self.original(self, *given))


def _rows(model: nn.Module, args: tuple, run: Callable) -> tuple:
    return tuple(t + 1e-3 if len(t) != 4 else t for t in run(*args))


def _twice(model: nn.Module, args: tuple, run: Callable) -> tuple:
    model.b.add_(1)
    return run(*args)


def _input(model: nn.Module, args: tuple, run: Callable) -> tuple:
    out = run(*args)
    args[0].data.mul_(2)
    return out


def _gradient(model: nn.Module, args: tuple, run: Callable) -> tuple:
    first, second = run(*args)
    return first + (args[0] - args[0].detach()), second


def _alias(model: nn.Module, args: tuple, run: Callable) -> tuple:
    both = torch.cat(run(*args), 0)
    return both.chunk(2)


def _strides(model: nn.Module, args: tuple, run: Callable) -> tuple:
    return tuple(t.t().contiguous().t() for t in run(*args))


def _error(model: nn.Module, args: tuple, run: Callable) -> tuple:
    raise RuntimeError("planted")


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (_rows, "output value"),
        (_twice, "effect value"),
        (_input, "effect value"),
        (_gradient, "gradient value"),
        (_alias, "aliases"),
        (_strides, "strides"),
        (_error, "raises"),
    ],
)
def test_what_is_planted_is_seen(monkeypatch: pytest.MonkeyPatch, wrong: Callable, kind: str) -> None:
    without = ("effect value", "aliases", "strides")  # a result of another form is another source of gradients as well
    program = replace(PROGRAM, grad=kind not in without)
    assert check.check(program) is None
    monkeypatch.setattr(check, "optimize", lambda model, *args, **kwargs: Planted(model, wrong))
    failure = check.check(program)
    assert failure is not None and failure.kind == kind, failure


def test_an_edit_by_the_capture_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def looks(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        with torch.no_grad():
            model.l.weight.mul_(1.001)
        return model

    monkeypatch.setattr(check, "optimize", looks)
    failure = check.check(PROGRAM)
    assert failure is not None and failure.kind == "capture edits", failure


def test_what_verification_rolls_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = SimpleNamespace(name="wrong", changes=[], rolled_back=["a rewrite"])
    entry = SimpleNamespace(executable=None, findings=SimpleNamespace(eager_reason="", passes=[ran]))

    def verified(model: nn.Module, example: object, config: Config) -> nn.Module:
        planted = Planted(model, _rows if config.verify == "off" else lambda model, args, run: run(*args))
        object.__setattr__(planted, "_fxopt", SimpleNamespace(entries=(entry,)))
        return planted

    monkeypatch.setattr(check, "optimize", verified)
    failure = check.check(replace(PROGRAM, verify="first"))
    assert failure is not None and failure.kind == "output value", failure


def test_rounding_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum in another order."""

    def reordered(model: nn.Module, args: tuple, run: Callable) -> tuple:
        x, layer = args[0], model.l
        v1 = (x.flip(1).unsqueeze(1) * layer.weight.flip(1)).sum(-1) + layer.bias
        return torch.relu(v1), v1

    monkeypatch.setattr(check, "optimize", lambda model, *args, **kwargs: Planted(model, reordered))
    assert check.check(replace(PROGRAM, later=(Sizes(64, 4), Sizes(33, 4)))) is None


@pytest.mark.parametrize(
    ("line", "dtype", "rounds"),
    [
        ("F.layer_norm(x, (4,))", torch.float64, True),
        ("F.relu(self.l(x)) * 2", torch.float64, False),
        ("F.layer_norm(x, (4,))", torch.float32, True),
        ("F.relu(self.l(x)) * 2", torch.float32, False),
    ],
)
def test_a_few_roundings_are_an_error_where_nothing_rounds(
    monkeypatch: pytest.MonkeyPatch, line: str, dtype: torch.dtype, rounds: bool
) -> None:
    """What is rounded on the way tells, for which eager's own results may be exact by luck."""

    def off(model: nn.Module, args: tuple, run: Callable) -> tuple:
        return (run(*args)[0] * (1 + 20 * torch.finfo(dtype).eps),)

    monkeypatch.setattr(check, "optimize", lambda model, *args, **kwargs: Planted(model, off))
    halves = (Input("x", "(torch.randint(-3, 4, (B, 4)) / 2).to(dtype)"),)
    program = replace(PROGRAM, inputs=halves, lines=(f"v1 = {line}",), outputs=("v1",), grad=False)
    assert (check.check(replace(program, dtype=dtype, whole=True)) is None) == rounds


def test_an_error_behind_a_cast_to_float_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cast is one to float64 in the reference, which would fail otherwise, and say nothing of rounding."""
    program = replace(PROGRAM, lines=("v1 = (x > 0).float()", "v2 = self.l(v1)"), outputs=("v2",), grad=False)

    def moved(model: nn.Module, args: tuple, run: Callable) -> Tensor:
        return run(*args)[0] + 5e-5

    monkeypatch.setattr(check, "optimize", lambda model, *args, **kwargs: Planted(model, moved))
    failure = check.check(program)
    assert failure is not None and failure.kind == "output value", failure


def test_shrinking_leaves_what_is_wrong() -> None:
    small = shrink.shrink(PROGRAM, lambda program: "relu" in "".join(program.lines) and _runs(program))
    assert len(small.lines) == 1 and not small.setup and not small.later and not small.grad
    assert "relu" in small.lines[0] and len(small.outputs) == 1
    compile(small.reproducer(), "reproducer", "exec")


def _runs(program: Program) -> bool:
    try:
        loaded = program.loaded()
        loaded.build()(*loaded.inputs(*program.captured))
    except Exception:
        return False
    return True


def test_a_dead_worker_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    start = subprocess.Popen

    def dies(command: list[str], **options: Any) -> subprocess.Popen:
        first = int(command[command.index("--seed") + 1])
        script = f"import os; print('at {first}', flush=True); " + ("os.abort()" if first < 5 else "")
        return start([sys.executable, "-c", script], **options)

    monkeypatch.setattr(subprocess, "Popen", dies)
    options = driver.parser().parse_args(["--kind", "dense", "--graphs", "4", "--seed", "3", "--processes", "1"])
    run = driver.Run(options)
    assert run.failures() == 2
    assert run.found == {("dense", "crash: SIGABRT"): [3, 4]}
    assert "dense 3: crash: SIGABRT" in capsys.readouterr().out
