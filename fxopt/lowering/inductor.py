"""Inductor on an ATen graph: no Dynamo, no guards per call, one artifact for every batch size.

Its kernel cache and its cache of FX graphs work as they do under torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fxopt.capture.settings import Changed
from fxopt.locks import lock
from fxopt.torch_internals.fake_tensors import FakeTensorMode
from fxopt.torch_internals.inductor import compile_both, compile_forward
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
            run = compile_both(flat, examples, mode, differentiated)
        else:
            run = compile_forward(flat, examples, mode)
    return (lambda *arguments: run(arguments)[0]) if single else (lambda *arguments: run(arguments))
