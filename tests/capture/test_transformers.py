"""nn.TransformerEncoder and its kin with masks: what they ask of data, and padding that inference leaves out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt import Config
from fxopt.capture import Capture, capture
from fxopt.runtime import dispatcher_of
from tests.capture.conftest import run


class Encoded(nn.Module):
    """ids [B, L], of which 0 is padding."""

    def __init__(self, mask: str = "", padded: bool = True, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder: nn.Module = nn.TransformerEncoder(layer, 2, **options)
        self.mask, self.padded = mask, padded
        self.register_buffer("causal", torch.full((20, 20), float("-inf")).triu(1))

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        padding = (ids == 0) if self.padded else None
        mask = torch.ones(length, length, dtype=torch.bool).triu(1) if self.mask == "bool" else None
        if self.mask == "buffer":
            mask = self.causal[:length, :length]
            padding = None if padding is None else torch.zeros(ids.shape).masked_fill(padding, float("-inf"))
        return self.encoder(self.table(ids), mask=mask, src_key_padding_mask=padding)


class Decoded(Encoded):
    def __init__(self, mask: str, padded: bool) -> None:
        super().__init__(mask, padded)
        layer = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = Turned(nn.TransformerDecoder(layer, 2))


class Turned(nn.Module):
    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, x: Tensor, mask: Tensor | None, src_key_padding_mask: Tensor | None) -> Tensor:
        return self.decoder(x, x, tgt_mask=mask, tgt_key_padding_mask=src_key_padding_mask)


def ids(batch: int, length: int = 6, padding: str = "end") -> Tensor:
    lengths = torch.randint(1, length + 1, (batch, 1))
    lengths[::5] = length
    absent = torch.arange(length) >= lengths
    if padding == "start":
        absent = absent.flip(1)
    elif padding == "row":
        absent[batch // 2] = True
    elif padding == "none":
        absent[:] = False
    return torch.randint(1, 50, (batch, length)).masked_fill(absent, 0)


def agrees(found: Capture, model: nn.Module, *batches: Tensor) -> None:
    assert not found.leaves
    for given in batches:
        got, want = run(found, model, given), model(given)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert got.stride() == want.stride() and got.requires_grad == want.requires_grad


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mask", ["bool", "buffer"])
@pytest.mark.parametrize("kind", [Encoded, Decoded])
def test_whether_a_mask_is_causal_is_not_asked(kind: Any, mask: str, padded: bool, training: bool) -> None:
    model = kind(mask, padded).train(training)
    for grad in {True, training}:
        with torch.set_grad_enabled(grad):
            found = capture(model, (ids(9),))
            paddings = ("end", "none", "start", "row") if padded and not grad else ("end",)
            agrees(found, model, *(ids(batch, padding=form) for batch in (1, 7, 32, 64) for form in paddings))


def test_gradients_with_a_causal_mask() -> None:
    model = Encoded("bool")
    fast = fxopt.optimize(model, (ids(9),), Config(tune="off"))
    for given in (ids(1), ids(7, 4), ids(32), ids(64)):
        gradients = [torch.autograd.grad(m(given).sin().sum(), list(model.parameters())) for m in (model, fast)]
        for want, got in zip(*gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    assert not dispatcher_of(fast).entries[0].findings.leaves


class ByHint(nn.TransformerEncoderLayer):
    """What is_causal says is all that it does about a mask."""

    def forward(
        self, src: Any, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: Any = False
    ) -> Tensor:
        return src.cumsum(1) if is_causal else src


def test_layers_of_others_are_told_the_truth() -> None:
    model = Encoded("bool", padded=False)
    model.encoder = nn.TransformerEncoder(ByHint(8, 2, 12, batch_first=True), 2)
    found = capture(model, (ids(9),))
    (asked,) = found.taken  # the mask, by its numbers
    assert asked.place.module == "encoder" and "for the answer yes" in asked.reason
    torch.testing.assert_close(run(found, model, given := ids(7)), model(given))


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@torch.no_grad()
def test_padding_that_inference_leaves_out(normed: bool, checked: bool) -> None:
    model = Encoded(norm=nn.LayerNorm(8) if normed else None, mask_check=checked).eval()
    if normed:
        nn.init.normal_(model.encoder.norm.bias)
    found = capture(model, (ids(9),))
    agrees(found, model, *(ids(b, padding=form) for b in (1, 7, 32, 64) for form in ("end", "none", "start")))
    agrees(found, model, ids(7, padding="row"), ids(7, 1), ids(7, 13), torch.eye(6, dtype=torch.long))


@torch.no_grad()
def test_nothing_but_padding_is_left_to_eager() -> None:
    model = Encoded().eval()
    fast = fxopt.optimize(model, (ids(9),), Config(tune="off"))
    for nothing in (torch.zeros(7, 6, dtype=torch.long), ids(0)):
        for either in (model, fast):
            with pytest.raises(RuntimeError, match=r"non-zero numel|non-empty TensorList"):
                either(nothing)
    torch.testing.assert_close(fast(given := ids(7)), model(given), rtol=1e-4, atol=1e-5)
    entry = dispatcher_of(fast).entries[0]
    assert not entry.findings.leaves and not entry.findings.eager_reason


def test_padding_is_kept_where_gradients_are() -> None:
    model = Encoded().eval()
    found = capture(model, (ids(9),))
    agrees(found, model, ids(1), ids(7), ids(32), ids(64, padding="start"))


@pytest.mark.parametrize("layer", ["first", "last"])
def test_layers_that_train_beside_others(layer: str) -> None:
    model = Encoded().eval().requires_grad_(False)
    model.encoder.layers[0 if layer == "first" else 1].requires_grad_(True)
    if layer == "first":
        agrees(capture(model, (ids(9),)), model, ids(7), ids(7, padding="start"))
    else:
        with pytest.raises(AssertionError, match="does not support NestedTensor"):  # as in eager
            capture(model, (ids(9),))


class OnADevice(Encoded):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.device("cpu"):
            return super().forward(ids)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, absent: Tensor) -> Tensor:
        return self.attention(x, x, x, key_padding_mask=absent, need_weights=False)[0]


@pytest.mark.parametrize("within", [True, False])
@torch.no_grad()
def test_a_default_device_keeps_torch_from_its_operators(within: bool) -> None:
    """They give zeros or NaN for what is masked, and the steps in their place do not."""
    example, known = ids(9), Encoded().eval()
    model = OnADevice().eval() if within else known
    model.load_state_dict(known.state_dict())
    without = known(example)
    with nullcontext() if within else torch.device("cpu"):
        found = capture(model, (example,))
        agrees(found, model, ids(1), ids(7), ids(32), ids(64, padding="start"))
        assert not model(example).equal(without)


@torch.no_grad()
def test_keys_that_are_all_masked_under_a_default_device() -> None:
    model, x = Masked().eval(), torch.randn(3, 5, 8)
    absent = torch.arange(5) >= torch.tensor([[0], [2], [5]])
    fast = fxopt.optimize(model, (x, absent))
    for _ in range(2):
        assert fast(x, absent)[0].isnan().all()
        with torch.device("cpu"):
            expected, found = Masked.forward(model, x, absent), fast(x, absent)
        assert not found.isnan().any() and found.stride() == expected.stride()
        torch.testing.assert_close(found, expected)
    assert len(entries := dispatcher_of(fast).entries) == 2 and all(entry.executable for entry in entries)


class ByNumbers(Encoded):
    def forward(self, ids: Tensor) -> Tensor:
        return self.encoder(self.table(ids), src_key_padding_mask=(ids == 0) * -1e9)


@torch.no_grad()
def test_padding_by_numbers_stays_opaque() -> None:
    model = ByNumbers().eval()
    found = capture(model, (ids(9),))
    assert [leaf.path for leaf in found.leaves] == ["encoder"]
    torch.testing.assert_close(run(found, model, given := ids(7)), model(given))


class Biased(nn.Module):
    """A layer whose mask holds numbers to add, which the operator for inference takes for a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return self.layer(x, src_mask=bias)


@pytest.mark.parametrize("training", [False, True])
def test_masks_of_numbers(training: bool) -> None:
    model = Biased().train(training)
    with torch.set_grad_enabled(training):
        found = capture(model, (torch.randn(9, 6, 8), torch.zeros(6, 6)))
        for batch in (1, 7, 32, 64):
            x, bias = torch.randn(batch, 6, 8), torch.randn(6, 6) * (torch.rand(6, 6) < 0.5)
            want = model(x, bias)
            torch.testing.assert_close(run(found, model, x, bias), want, rtol=1e-4, atol=1e-5, equal_nan=True)
