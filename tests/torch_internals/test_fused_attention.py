"""Where torch's attention and transformers keep what they ask before they take operators for inference."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from fxopt.torch_internals.fused_attention import as_fused, asks_for_hint, leaves_fused, may_nest, nests

KINDS: dict[type[nn.Module], tuple[Any, nn.Module]] = {
    nn.MultiheadAttention: (F.multi_head_attention_forward, nn.MultiheadAttention(4, 2, batch_first=True)),
    nn.TransformerEncoderLayer: (torch.Tensor.add, nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grad", [True, False])
def test_the_tensors_that_it_asks_about_are_found(kind: type[nn.Module], grad: bool) -> None:
    function, module = KINDS[kind]
    seen: list[bool] = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            if func is function:
                seen.append(leaves_fused(kind))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, 3, 4)
    with torch.set_grad_enabled(grad), Watching():
        module.eval()(*[x] * (3 if kind is nn.MultiheadAttention else 1))
    assert seen and seen[0] != grad, (
        f"{kind.__name__}.forward keeps no `tensor_args`: fxopt/capture/function_mode.py gives other strides than eager"
    )


def test_the_operator_gives_nan_where_all_is_masked() -> None:
    attention, x = KINDS[nn.MultiheadAttention][1].eval(), torch.randn(2, 3, 4)
    mask = torch.tensor([[True] * 3, [False] * 3])
    with torch.no_grad():
        expected, _ = attention(x, x, x, key_padding_mask=mask, need_weights=False)
        unmasked, _ = attention(x, x, x, need_weights=False)
    found: list[Any] = []

    class Calling(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            return (
                as_fused(func, args, kwargs)
                if func is F.multi_head_attention_forward
                else func(*args, **(kwargs or {}))
            )

    with Calling(), torch.no_grad():
        found, _ = attention(x, x, x, key_padding_mask=mask, need_weights=False)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found.stride() == unmasked.stride(), "the operator for inference lays its result out otherwise by now"


def encoder(**options: Any) -> nn.TransformerEncoder:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, **options)


class Counting(TorchFunctionMode):
    """How often a function is called, and how often `asked` holds then."""

    def __init__(self, function: Any, asked: Any) -> None:
        super().__init__()
        self.function, self.asked, self.answers = function, asked, list[bool]()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is self.function:
            self.answers.append(self.asked())
        return func(*args, **(kwargs or {}))


def test_a_transformer_asks_for_hints() -> None:
    x, mask = torch.ones(2, 3, 4), torch.ones(3, 3, dtype=torch.bool).triu(1)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8, batch_first=True), 2)
    with Counting(torch.Tensor.__bool__, asks_for_hint) as counting:
        encoder()(x, mask=mask)
        decoder(x, x, tgt_mask=mask)
    assert sum(counting.answers) == 2, (
        "_detect_is_causal_mask asks otherwise: fxopt/capture/function_mode.py does not know that it only wants a hint"
    )
    other = encoder()
    other.layers[1] = type("Other", (nn.TransformerEncoderLayer,), {})(4, 2, 8, batch_first=True)
    with Counting(torch.Tensor.__bool__, asks_for_hint) as counting:
        other(x, mask=mask)
        bool(torch.ones(1))
    assert counting.answers and not any(counting.answers)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_an_encoder_nests_where_it_is_said_to(nested: bool, masked: bool, grad: bool, named: bool) -> None:
    model, x = encoder(enable_nested_tensor=nested).eval(), torch.ones(2, 3, 4)
    mask = torch.ones(3, 3, dtype=torch.bool).triu(1) if masked else None
    padding = torch.tensor([[False, False, True], [False] * 3])
    with torch.set_grad_enabled(grad), torch.device("cpu") if named else nullcontext():
        expected = may_nest(model) and nests(model, x, mask)
        with Counting(torch._nested_tensor_from_mask, lambda: True) as counting:  # which the mode itself forbids
            model(x, mask=mask, src_key_padding_mask=padding)
        zeros = (model(x, mask=mask, src_key_padding_mask=padding)[0, 2] == 0).all()
    assert not counting.answers and zeros == expected, "fxopt/capture/padded.py puts zeros where eager has none"
