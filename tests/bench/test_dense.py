from __future__ import annotations

import threading

import pytest
import torch

from bench import clients, compilers, contenders, dense, timing
from bench.dense_models import Entry, TrainingStep, entries, mlp
from bench.verify import Judge
from tests.bench.timed import cell

SMALL = Entry("small", lambda: mlp(4, 8, 1), lambda B, g: (torch.randn(B, 4, generator=g),))


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_the_models_run_and_repeat(entry):
    model = entry.make_model()
    args = entry.make_inputs(3, 0, model)
    Judge(model).expect(args).check("the same model", entry.make_model()(*args))


def test_a_model_is_verified_timed_and_weighed():
    made = contenders.run_model(SMALL, (1, 8), 0.01, ("fx",), limit=0)
    assert [c.labels for c in made.cells] == [("small", "1"), ("small", "8")]
    assert all(set(c.timings) == {"eager", "fxopt"} and not c.refused for c in made.cells)
    assert 8 * 8 * 4 <= made.peak_bytes["eager"] <= 4 * 8 * 8 * 4
    assert not made.skipped, "nobody asked for torch.compile"
    assert set(made.served) == {"eager", "fxopt"} and all(rate > 0 for rate in made.served["fxopt"].values())


def test_a_client_that_fails_stops_all():
    def call(x):
        raise ValueError("it does not work")

    with pytest.raises((ValueError, threading.BrokenBarrierError)):
        clients.served_clients({"eager": call}, lambda args: args, (1,), 0.01)


def test_onnx_runtime_gives_the_answers_of_all_batch_sizes():
    pytest.importorskip("onnxruntime"), pytest.importorskip("onnxscript")
    model = SMALL.make_model()
    package = compilers.packaged(model, SMALL.make_inputs(3, 0, model), 60)[compilers.ONNX]
    (x,) = SMALL.make_inputs(7, 0, model)
    torch.testing.assert_close(package.call(x), model(x))


def test_what_is_cold_has_a_cell_of_its_own(monkeypatch):
    monkeypatch.setattr(timing, "OTHER_WORK", 1 << 20)
    made = contenders.run_model(SMALL, (1, 8), 0.01, ("fx",), limit=0, cold=(8,))
    assert [c.labels for c in made.cells] == [("small", "1"), ("small", "8"), ("small, cold", "8")]


def test_a_training_step_gives_the_gradients():
    model = SMALL.make_model()
    (x,) = SMALL.make_inputs(5, 0, model)
    loss, *grads = TrainingStep(model)(x)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(model(x), torch.ones(5, 1))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)
    step = contenders.run_step(SMALL, 16, 0.01, limit=0)
    assert set(step.timings) == {"eager", "fxopt"} and not step.refused


def test_means_are_over_the_cells_that_all_contenders_ran():
    cells = [cell("a", 1, eager=4.0, fxopt=1.0, other=2.0), cell("b", 1, eager=9.0, fxopt=1.0)]
    assert dense.geometric_means(cells, ("fxopt", "other"))["1"] == pytest.approx({"fxopt": 4.0, "other": 2.0})
    assert dense.geometric_means(cells, ("fxopt",))["1"]["fxopt"] == pytest.approx(6.0)
    steps = [cell("a, training step", 1, eager=9.0, fxopt=1.0), cell("a, cold", 1, eager=9.0, fxopt=1.0)]
    assert not dense.geometric_means(steps, ("fxopt",)), "calls alone are averaged"


def test_a_compile_that_takes_too_long_is_left_out(monkeypatch):
    def forever(model, mode):
        def call(*args):
            while True:
                pass

        return call

    monkeypatch.setattr(torch, "compile", forever)
    assert "not done after" in compilers.compiled(SMALL.make_model(), (), 0.05)[compilers.COMPILE].reason


def test_the_plot(tmp_path):
    pytest.importorskip("matplotlib")
    from bench.plot import draw

    cells = [cell("lib/a", batch, eager=4.0, fxopt=1.0) for batch in (1, 256)]
    paths = draw(cells, ("torch.compile", "fxopt"), tmp_path / "plot")
    assert [path.suffix for path in paths] == [".png", ".svg"] and all(path.stat().st_size for path in paths)
