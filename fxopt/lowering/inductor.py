"""Inductor on an ATen graph: no Dynamo, no guards per call, one artifact for every batch size.

Its kernel cache and its cache of FX graphs work as they do under torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxopt.capture.settings import Changed
from fxopt.locks import lock
from fxopt.torch_internals.patches import OBLIVIOUS

Compiled = Callable[..., Any]
_COMPILING = lock()  # the settings that are changed meanwhile are the process's


def compile_graph(
    function: Callable[..., Any],
    examples: Sequence[Any],
    mode: FakeTensorMode,
    differentiated: Sequence[bool] | None,
    single: bool,
) -> Compiled:
    """`function` as compiled code of the same arguments.

    Args:
        function: calls functional ATen operators.
        examples: fake tensors of `mode` and symbolic sizes, one an argument.
        differentiated: which arguments may want a gradient (None: nothing will be differentiated). Forward and
            backward are compiled; the function raises AssertionError where another argument wants one.
        single: it returns one tensor, not a tuple.

    Raises: whatever the compiler does, where there is none among other reasons.
    """

    def flat(*arguments: Any) -> tuple:
        results = function(*arguments)
        return (results,) if single else tuple(results)

    with _COMPILING, Changed([OBLIVIOUS]):
        if differentiated is not None:
            run = _both(flat, examples, mode, differentiated)
        else:
            run = _forward(flat, examples, mode)
    return (lambda *arguments: run(arguments)[0]) if single else (lambda *arguments: run(arguments))


def _forward(flat: Callable[..., tuple], examples: Sequence[Any], mode: FakeTensorMode) -> Callable[[tuple], Any]:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    fakes = [example.detach() if isinstance(example, Tensor) else example for example in examples]
    with torch.no_grad(), mode, config.patch(size_asserts=True):
        decomposed = make_fx(flat, select_decomp_table(), "symbolic", _allow_non_fake_inputs=True)(*fakes)
        compiled: Any = compile_fx_inner(decomposed, fakes, is_inference=True)
    run = getattr(compiled, "current_callable", None) or compiled  # past 5 us of bookkeeping

    return lambda arguments: run(list(arguments))


def _both(
    flat: Callable[..., tuple], examples: Sequence[Any], mode: FakeTensorMode, differentiated: Sequence[bool]
) -> Callable[[tuple], Any]:
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
