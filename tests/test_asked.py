"""What cannot be meant is refused in a sentence, and example inputs may have the forms that users write."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt.config import Config
from fxopt.optimize import optimize


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.layer(x)
        return y if scale is None else y * scale


class OfFeatures(nn.Module):
    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return features["a"] + features["b"]


X, SCALE = torch.randn(3, 4), torch.rand(3, 1)


@pytest.mark.parametrize(
    ("example", "args", "kwargs"),
    [
        (X, (X,), {}),
        ((X, SCALE), (X, SCALE), {}),
        ([X, SCALE], (X, SCALE), {}),
        ({"x": X, "scale": SCALE}, (), {"x": X, "scale": SCALE}),
    ],
)
def test_forms_of_example_inputs(example: Any, args: tuple, kwargs: dict) -> None:
    model = Scaled().eval()
    fast: Any = optimize(model, example)
    with torch.no_grad():
        torch.testing.assert_close(fast(*args, **kwargs), model(*args, **kwargs))
    assert len(fast._fxopt.entries) == 1 and fast._fxopt.entries[0].executable is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_model_in_eval_mode_is_captured_as_it_is_served(mode: Any) -> None:
    fast: Any = optimize(Scaled().eval(), X)
    with mode():
        fast(X)
    assert len(fast._fxopt.entries) == 1


def test_a_model_in_train_mode_is_captured_as_it_is_trained() -> None:
    fast: Any = optimize(Scaled().train(), X)
    fast(X).sum().backward()
    assert len(fast._fxopt.entries) == 1 and fast.layer.weight.grad is not None


def test_a_forward_of_one_dict_takes_a_tuple() -> None:
    features = {"a": torch.rand(3), "b": torch.rand(3)}
    with pytest.raises(TypeError, match=r".*'features'; for a forward of one dict write \(inputs,\)"):
        optimize(OfFeatures(), features)
    assert torch.equal(optimize(OfFeatures(), (features,))(features), features["a"] + features["b"])


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ((Config(),), TypeError, "the third argument: config="),
        ((7,), TypeError, r"expected a tuple .* found int; for a forward of one int write \(inputs,\)"),
        (((X,), {"tune": "off"}), TypeError, "expected an fxopt.Config, found dict"),
        (((X,), Config(disable=("linear_chain",))), ValueError, "'linear_chain'; did you mean 'linear_chains'?"),
        (((X,), Config(disable=("zzz",))), ValueError, "names of passes, found 'zzz'$"),
        (((X,), Config(leaves=("layers",))), ValueError, "found 'layers'; did you mean 'layer'?"),
    ],
)
def test_what_cannot_be_meant(arguments: tuple, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        optimize(Scaled(), *arguments)


class Signed(nn.Module):
    """Its forward branches on data, so it stays a leaf, of which the layers are optimized by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        return y if float(y.sum()) > 0 else y * 2


@pytest.mark.parametrize("leaves", [("last",), ("signed.second",), ("signed",)])
def test_leaves_beside_and_inside_of_other_leaves(leaves: tuple[str, ...]) -> None:
    model = nn.Sequential(OrderedDict(signed=Signed(), last=nn.Linear(4, 2))).eval()
    with torch.no_grad():
        fast: Any = optimize(model, (X,), Config(leaves=leaves))
        torch.testing.assert_close(fast(X), model(X))
    (entry,) = fast._fxopt.entries
    assert entry.executable is not None, entry.findings.eager_reason
    assert {"signed", *leaves} >= {leaf.path for leaf in entry.executable.capture.leaves} >= {"signed"}


def test_a_model_without_values() -> None:
    model = Scaled().to("meta")
    with pytest.raises(ValueError, match=r"found 'layer\.weight' on device meta: load its state first"):
        optimize(model, (X,))
    fast = optimize(model).to_empty(device="cpu")
    assert fast(X).shape == (3, 2)


def test_compiled_modules_are_refused() -> None:
    with pytest.raises(TypeError, match=r"optimize before torch\.compile"):
        optimize(torch.compile(Scaled()), (X,))
