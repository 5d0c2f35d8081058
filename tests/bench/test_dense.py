from __future__ import annotations

import pytest
import torch

from bench import dense
from bench.cells import Cell
from bench.dense_models import Entry, TrainingStep, entries, mlp
from bench.timing import Timing
from bench.verify import Judge

SMALL = Entry("small", lambda: mlp(4, 8, 1), lambda B, g: (torch.randn(B, 4, generator=g),))


def cell(name: str, batch: int, **seconds: float) -> Cell:
    timings = {who: Timing((each,), each) for who, each in seconds.items()}
    return Cell((name, str(batch)), "eager", timings, dict.fromkeys(timings, 0.0), {})


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_the_models_run_and_repeat(entry):
    model = entry.make_model()
    args = entry.make_inputs(3, 0, model)
    Judge(model).expect(args).check("the same model", entry.make_model()(*args))


def test_a_model_is_verified_timed_and_weighed():
    made = dense.run_model(SMALL, (1, 8), 0.01, ("fx",), limit=0)
    assert [c.labels for c in made.cells] == [("small", "1"), ("small", "8")]
    assert all(set(c.timings) == {"eager", "fxopt"} and not c.refused for c in made.cells)
    assert 8 * 8 * 4 <= made.peak_bytes["eager"] <= 4 * 8 * 8 * 4
    assert "left out" in made.skipped["torch.compile, batch 1"]


def test_a_training_step_gives_the_gradients():
    model = SMALL.make_model()
    (x,) = SMALL.make_inputs(5, 0, model)
    loss, *grads = TrainingStep(model)(x)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(model(x), torch.ones(5, 1))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad)
    step = dense.run_step(SMALL, 16, 0.01, limit=0)
    assert set(step.timings) == {"eager", "fxopt"} and not step.refused


def test_means_are_over_the_cells_that_all_contenders_ran():
    cells = [cell("a", 1, eager=4.0, fxopt=1.0, other=2.0), cell("b", 1, eager=9.0, fxopt=1.0)]
    assert dense.geometric_means(cells, ("fxopt", "other"))["1"] == pytest.approx({"fxopt": 4.0, "other": 2.0})
    assert dense.geometric_means(cells, ("fxopt",))["1"]["fxopt"] == pytest.approx(6.0)


def test_a_compile_that_takes_too_long_is_left_out(monkeypatch):
    def forever(model):
        def call(*args):
            while True:
                pass

        return call

    monkeypatch.setattr(torch, "compile", forever)
    assert "not done after" in dense.compiled(SMALL.make_model(), (), 0.05).reason


def test_the_plot(tmp_path):
    pytest.importorskip("matplotlib")
    from bench.plot import draw

    cells = [cell("lib/a", batch, eager=4.0, fxopt=1.0) for batch in (1, 256)]
    paths = draw(cells, ("torch.compile", "fxopt"), tmp_path / "plot")
    assert [path.suffix for path in paths] == [".png", ".svg"] and all(path.stat().st_size for path in paths)
