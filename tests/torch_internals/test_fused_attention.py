"""Where nn.MultiheadAttention keeps what it asks before it takes its operator for inference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from fxopt.torch_internals.fused_attention import as_fused, leaves_fused

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
