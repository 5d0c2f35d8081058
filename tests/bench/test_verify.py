from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bench.cells import run_cell
from bench.dense_models import TrainingStep
from bench.verify import DRAWS, Expected, Judge, WrongAnswer


class Model(nn.Module):
    """A float and an integer output of a float input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.linear(x)
        return {"y": y, "best": y.argmax(1)}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def expected(x) -> Expected:
    return Judge(Model()).expect((x,))


def test_a_reordered_sum_passes(x, expected):
    model, order = Model(), torch.randperm(16)
    y = nn.functional.linear(x[:, order], model.linear.weight[:, order], model.linear.bias).detach()
    assert expected.check("reordered", {"y": y, "best": y.argmax(1)}) < 1e-5


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda y, best: {"y": y * 1.0001, "best": best}, "output 0: error"),
        (lambda y, best: {"y": y.half().float(), "best": best}, "output 0: error"),
        (lambda y, best: {"y": y, "best": best + 1}, "integers differ"),
        (lambda y, best: {"y": y[:, :3], "best": best}, r"expected torch.float32 \[5, 4\]"),
        (lambda y, best: {"y": y.double(), "best": best}, "found torch.float64"),
        (lambda y, best: {"y": y.index_fill(0, torch.tensor([2]), float("nan")), "best": best}, "NaN or infinity"),
        (lambda y, best: {"y": y.flip(0), "best": best}, "output 0: error"),
        (lambda y, best: (y, best), "structure"),
    ],
)
def test_wrong_answers_are_refused(x, expected, spoil, message):
    output = Model()(x)
    with pytest.raises(WrongAnswer, match=message):
        expected.check("spoilt", spoil(output["y"].detach(), output["best"]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_have_to_be_eager_s(value):
    eager = torch.tensor([1.0, value])
    expected = Expected([eager], [eager.double()], None)
    for other in {0.0, 1e38, float("inf"), -float("inf")} - {value}:
        with pytest.raises(WrongAnswer, match="NaN or infinity"):
            expected_check(expected, torch.tensor([1.0, other]))
    assert expected_check(expected, eager.clone()) == 0.0


def expected_check(expected: Expected, output: Tensor) -> float:
    from torch.utils._pytree import tree_structure

    expected.spec = tree_structure(output)
    return expected.check("it", output)


def test_a_wrong_contender_is_not_timed(x):
    model = Model().eval()
    expected = Judge(model).expect((x,))

    def wrong(x: Tensor) -> dict[str, Tensor]:
        return model(x + 0.01)

    cell = run_cell(("5",), {"eager": model, "wrong": wrong, "right": model.forward}, [(x,)], [expected], seconds=0)
    assert set(cell.timings) == {"eager", "right"}
    assert "budget" in cell.refused["wrong"]
    assert set(cell.as_dict()["contenders"]) == {"eager", "right"}


def test_one_wrong_input_among_many_refuses(x):
    model = Model().eval()
    inputs = [(x,), (x * 2,), (x * 3,)]
    expected = [Judge(model).expect(args) for args in inputs]
    memo: list[dict[str, Tensor]] = []

    def stale(x: Tensor) -> dict[str, Tensor]:
        memo.append(model(x))
        return memo[0]

    cell = run_cell(("5",), {"eager": model, "stale": stale}, inputs, expected, seconds=0)
    assert "stale" in cell.refused


def test_a_wrong_base_is_an_error(x):
    model = Model().eval()
    with pytest.raises(WrongAnswer, match="base of the comparison"):
        run_cell(("5",), {"eager": lambda x: model(-x)}, [(x,)], [Judge(model).expect((x,))], seconds=0)


def test_a_batch_that_stands_at_a_kink_is_drawn_again():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 4), nn.ReLU())
    at_kink, smooth = torch.randn(2, 3, 16).unbind(0)
    with torch.no_grad():
        model[0].bias.copy_(-nn.functional.linear(at_kink[0], model[0].weight))
    weights = [p.clone() for p in model.parameters()]
    judge = Judge(TrainingStep(model))
    args, expected = judge.expect_smooth(lambda seed: ((at_kink, smooth)[min(seed, 1)],))
    assert args[0] is smooth
    assert expected.check("eager", TrainingStep(model)(smooth)) < 1e-5
    assert all(map(torch.equal, weights, model.parameters()))


def test_the_last_batch_is_taken_where_none_is_smooth():
    model = nn.Sequential(nn.Linear(16, 4, bias=False), nn.ReLU())
    with torch.no_grad():
        model[0].weight.copy_(torch.cat([torch.ones(4, 8), -torch.ones(4, 8)], 1))
    drawn: list[int] = []

    def draw(seed: int) -> tuple:
        drawn.append(seed)
        return (torch.ones(3, 16),)

    Judge(TrainingStep(model)).expect_smooth(draw)
    assert drawn == list(range(DRAWS))
