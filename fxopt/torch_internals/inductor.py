"""Inductor on an ATen graph, without Dynamo in front. It takes seconds to import: not before it is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxopt.torch_internals.fake_tensors import FakeTensorMode
from fxopt.torch_internals.tracing import make_fx

Flat = Callable[..., tuple]


def compile_forward(flat: Flat, examples: Sequence[Any], mode: FakeTensorMode) -> Callable[[tuple], Any]:
    """A function of a tuple, nothing of which will be differentiated."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    fakes = [example.detach() if isinstance(example, Tensor) else example for example in examples]
    with torch.no_grad(), mode, config.patch(size_asserts=True):
        decomposed = make_fx(flat, select_decomp_table(), "symbolic", _allow_non_fake_inputs=True)(*fakes)
        compiled: Any = compile_fx_inner(decomposed, fakes, is_inference=True)
    run = getattr(compiled, "current_callable", None) or compiled  # past 5 us of bookkeeping

    return lambda arguments: run(list(arguments))


def compile_both(
    flat: Flat, examples: Sequence[Any], mode: FakeTensorMode, differentiated: Sequence[bool]
) -> Callable[[tuple], Any]:
    """A function of a tuple, and its backward. It raises AssertionError where another argument wants a gradient."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    fakes = [
        example.detach().requires_grad_(wanted and example.is_floating_point())
        if isinstance(example, Tensor)
        else example
        for example, wanted in zip(examples, differentiated, strict=True)
    ]
    now = functorch_config.patch(force_non_lazy_backward_lowering=True)  # its errors belong here
    with torch.enable_grad(), config.patch(size_asserts=True), now:
        with mode:
            traced = make_fx(flat, None, "symbolic", _allow_non_fake_inputs=True)(*fakes)
        compiled: Any = compile_fx(traced, fakes)
    without = [i for i, fake in enumerate(fakes) if isinstance(fake, Tensor) and not fake.requires_grad]

    def run(arguments: tuple) -> Any:
        for i in without:
            assert not arguments[i].requires_grad, "it gives no gradient of what had none in the capture"
        return compiled(*arguments)

    return run
