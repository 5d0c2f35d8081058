"""Any pytree in and out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn

import fxopt
from fxopt.capture import CaptureError, capture
from fxopt.runtime import dispatcher_of
from fxopt.torch_internals.hooks import HOOKS
from tests.capture.conftest import run


class Pair(NamedTuple):
    ids: torch.Tensor
    scale: float


@dataclass
class Batch:
    dense: torch.Tensor
    ids: dict


pytree.register_dataclass(Batch)


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 3)

    def forward(self, batch, pair, *, extra=None, flag=True):
        x = self.table(batch.ids["a"]) * pair.scale + batch.dense
        y = x + self.table(pair.ids) if flag else x
        again = y if extra is None else y + extra["e"][0]
        more = [None, 3, batch.dense, Pair(again, 2.0)]
        return {"y": y, "same": y, "more": more, "batch": Batch(x, {"s": x.shape[0]})}


def structured_inputs(batch: int) -> tuple[tuple, dict]:
    ids = torch.randint(0, 10, (2, batch))
    args = (Batch(torch.rand(batch, 3), {"a": ids[0]}), Pair(ids[1], 0.5))
    return args, {"extra": {"e": [torch.rand(batch, 3)]}, "flag": True}


def test_nested_inputs_and_outputs(check):
    model = Structured()
    args, kwargs = structured_inputs(1)
    found = capture(model, args, kwargs)
    assert [value for _, value in found.constants] == [0.5, True]
    assert found.inputs[1].name == "args[0].ids['a']"
    assert found.inputs[-1].name == "kwargs['extra']['e'][0]"
    for batch in (0, 1, 5):
        args, kwargs = structured_inputs(batch)
        check(found, model, *args, **kwargs)


def test_inputs_and_state_returned_as_they_are():
    class Identity(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(2))

        def forward(self, x):
            return x, self.weight, x[1:], x

    model = Identity()
    found = capture(model, (torch.rand(4),))
    x = torch.rand(5)
    outputs = found.graph(*[slot.read(model) for slot in found.state], x)
    assert outputs[0] is x and outputs[1] is model.weight and outputs[3] is x
    assert outputs[2].data_ptr() == x[1:].data_ptr()


def test_a_size_is_returned_as_a_size():
    class Shape(nn.Module):
        def forward(self, x):
            return x * 2, x.shape, {"rest": x.size()[1:]}

    _, shape, rest = fxopt.optimize(Shape())(torch.rand(4, 3))
    assert type(shape) is torch.Size and shape == (4, 3) and type(rest["rest"]) is torch.Size


def test_an_unregistered_class_is_refused():
    class Holder:
        x = torch.rand(3)

    with pytest.raises(CaptureError, match=r"args\[0\].*Holder.*register_pytree_node"):
        capture(nn.Identity(), (Holder(),))


@dataclass(frozen=True)
class Rows:
    """A dataclass that nobody has registered."""

    ids: torch.Tensor
    scale: float = 2.0


@dataclass
class Scores:
    logit: torch.Tensor
    parts: dict[str, list[Rows]]
    loss: torch.Tensor | None = None

    def __post_init__(self):
        self.logit = self.logit + 1


class Unregistered(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 3)

    def forward(self, rows):
        x = self.table(rows.ids) * rows.scale
        return Scores(x.sum(1), {"rows": [Rows(x), rows]})


@pytest.mark.parametrize("batch", [1, 3, 5])
def test_dataclasses_need_not_be_registered(batch):
    model = Unregistered()
    fast = fxopt.optimize(model, (Rows(torch.tensor([1, 2])),))
    given = Rows(torch.arange(batch))
    expected, found = model(given), fast(given)
    assert type(found) is Scores and vars(found).keys() == vars(expected).keys() and found.loss is None
    torch.testing.assert_close(found.logit, expected.logit)
    ours, theirs = found.parts["rows"], expected.parts["rows"]
    torch.testing.assert_close(ours[0].ids, theirs[0].ids)
    assert ours[1].ids is given.ids and ours[1].scale == 2.0
    assert len(dispatcher_of(fast).entries) == 1 and not dispatcher_of(fast).findings[0].eager_reason
    again = Rows(given.ids, 3.0)  # a constant that changed
    torch.testing.assert_close(fast(again).logit, model(again).logit)


@pytest.mark.parametrize("edit", ["pop", "set", "append", "field"])
def test_containers_of_the_caller_are_edited_as_in_eager(edit):
    class Edits(nn.Module):
        def forward(self, batch):
            rows, x = batch["rows"], batch["list"][0] * 2
            if edit == "pop":
                x = x + batch.pop("label")
            elif edit == "set":
                batch["twice"] = x
            elif edit == "append":
                batch["list"].append(x)
            else:
                rows.logit = x
            return x + 1

    def batch():
        return {"rows": Scores(torch.ones(3), {}), "list": [torch.arange(3.0)], "label": torch.ones(3)}

    model = Edits()
    fast = fxopt.optimize(model)
    for _ in range(3):
        ours, theirs = batch(), batch()
        assert torch.equal(fast(ours), model(theirs))
        assert ours.keys() == theirs.keys() and len(ours["list"]) == len(theirs["list"])
        assert torch.equal(ours["rows"].logit, theirs["rows"].logit)
    assert len(dispatcher_of(fast).entries) == 1, "known before the call changes it"


def test_errors_of_the_model_are_the_models():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        capture(nn.Linear(3, 2), (torch.rand(4, 5),))
    with pytest.raises(TypeError, match="positional"):
        capture(nn.Linear(3, 2), (torch.rand(4, 3), 1))


def test_item_without_control_flow(check):
    class Item(nn.Module):
        def forward(self, x):
            return x * x.sum().item()

    found = capture(Item(), (torch.rand(4),))
    check(found, Item(), torch.rand(7))


def test_no_grad_inside(check):
    class NoGrad(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            with torch.no_grad():
                y = self.linear(x)
            return y + self.linear(x)

    model = NoGrad()
    found = capture(model, (torch.rand(4, 3),))
    check(found, model, torch.rand(5, 3))
    twin = NoGrad()
    twin.load_state_dict(model.state_dict())
    x = torch.rand(2, 3)
    twin(x).sum().backward()
    found.graph(*[slot.read(model) for slot in found.state], x)[0].sum().backward()
    torch.testing.assert_close(model.linear.weight.grad, twin.linear.weight.grad)


def test_exported_program(check):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
    batch = torch.export.Dim("batch", min=2, max=512)
    program = torch.export.export(model.eval(), (torch.rand(4, 4),), dynamic_shapes=({0: batch},))
    unlifted = program.module()
    for name in HOOKS:  # the input check runs around the forward
        vars(unlifted)[name].clear()
    found = capture(unlifted, (torch.rand(4, 4),))
    assert {str(slot) for slot in found.state} <= set(model.state_dict())
    check(found, unlifted, torch.rand(9, 4))


class Attended(nn.Module):
    """Torch's fused attention, which it leaves under a tracer: its strides can be seen, and NaN where all is masked."""

    def __init__(self, weights: bool):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.weights = weights

    def forward(self, x, mask):
        found, _ = self.attention(x, x, x, key_padding_mask=mask, need_weights=self.weights)
        return found.view(x.shape[0], 40)


@pytest.mark.parametrize("weights", [False, True])
@torch.no_grad()
def test_fused_attention(weights):
    model, mask = Attended(weights).eval(), torch.rand(3, 5) < 0.5
    mask[:, 0], mask[1] = False, True
    found = capture(model, (torch.randn(4, 5, 8), torch.zeros(4, 5, dtype=torch.bool)))
    x = torch.randn(3, 5, 8)
    got, want = run(found, model, x, mask), model(x, mask)
    assert want[1].isnan().all() and not want[0].isnan().any()
    torch.testing.assert_close(got, want, equal_nan=True)
