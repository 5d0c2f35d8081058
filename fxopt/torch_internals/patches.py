"""Functions of torch, and `builtins.len`, that a trace needs otherwise: (object, name, what stands there meanwhile).

Other threads see no difference: each function asks whether the thread that made it calls, or for whose fake tensor.
`tests/runtime/test_other_threads.py` shows it.
"""

from __future__ import annotations

import builtins
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import sympy
import torch
import torch.fx.experimental._config as shape_config
import torch.fx.experimental.proxy_tensor as proxy_tensor
import torch.utils.checkpoint as checkpoint
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import _SingleLevelFunction
from torch.utils._sympy.functions import FloorDiv

from fxopt.torch_internals.shape_env import TraceShapeEnv
from fxopt.torch_internals.symbols import exact_quotient

Change = tuple[Any, str, Any]
OBLIVIOUS: Change = (shape_config, "backed_size_oblivious", True)  # sizes are not 0 or 1 by accident


def no_tensor_meta() -> Change:
    """meta["tensor_meta"] takes 40% of a trace and nobody here reads it."""
    original, here = proxy_tensor._extract_tensor_metadata, threading.get_ident()

    def extract(tensor: torch.Tensor, *args: Any) -> Any:
        return None if threading.get_ident() == here else original(tensor, *args)

    return proxy_tensor, "_extract_tensor_metadata", extract


def contiguous_unasked() -> Change:
    """Tensor.contiguous() asks is_contiguous() before it reaches a mode, which guards on sizes of 1."""

    def contiguous(self: Any, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        if not isinstance(self.fake_mode.shape_env, TraceShapeEnv):
            return torch.Tensor.contiguous(self, memory_format=memory_format)
        return torch.ops.aten.contiguous.default(self, memory_format=memory_format)

    return FakeTensor, "contiguous", contiguous


def overlap_unasked() -> Change:
    """A copy into a tensor, as x[:, 1:] = y makes, asks whether the tensor's elements share memory, which guards on no
    rows and on one: only a stride of 0 can say so."""
    original, here = torch._debug_has_internal_overlap, threading.get_ident()

    def overlaps(tensor: torch.Tensor) -> int:
        too_hard = threading.get_ident() == here and isinstance(tensor, FakeTensor) and not _has_strides_of_0(tensor)
        return 2 if too_hard else original(tensor)

    return torch, "_debug_has_internal_overlap", overlaps


def exact_quotients() -> Change:
    """Of a product and some of its factors, as in x.view(rows, -1, heads, width), torch works a // b out by
    sympy.simplify. That takes 0.3 s where a size is a nest of Max and //, and may spell it in another way."""
    original, here = FloorDiv.__dict__["eval"], threading.get_ident()

    def evaluated(cls: Any, base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr | None:
        if threading.get_ident() == here and (quotient := exact_quotient(base, divisor)) is not None:
            return quotient
        return original.__get__(None, cls)(base, divisor)

    return FloorDiv, "eval", classmethod(evaluated)


def no_saving_hooks(refused: Callable[[], Exception]) -> Change:
    """A forward that puts its own hooks around what backward needs (saved_tensors_hooks, save_on_cpu) raises
    `refused()`. Those of torch.utils.checkpoint are of a class of its own."""
    hooks, here = torch.autograd.graph.saved_tensors_hooks, threading.get_ident()
    original = hooks.__enter__

    def enter(self: Any) -> Any:
        if threading.get_ident() == here and type(self).__module__ == hooks.__module__ and torch.is_grad_enabled():
            raise refused()
        return original(self)

    return hooks, "__enter__", enter


def _has_strides_of_0(tensor: torch.Tensor) -> bool:
    return any(isinstance(stride, int) and stride == 0 for stride in tensor.stride())


def autograd_functions(called: Callable[..., Any], reentrant: Callable[..., Any]) -> Change:
    """An autograd.Function would be inlined, and its backward lost: `called(cls, apply, *args, **kwargs)` gives its
    results instead. That of checkpoint(use_reentrant=True) is `reentrant(function, preserve_rng_state, *args)`.

    Function.apply asks its base class, so an apply that was kept before (scan = Scan.apply) comes here, too. What a
    function calls itself is a part of it.
    """
    apply, here, within = torch._C._FunctionBase.__dict__["apply"], threading.get_ident(), False

    def instead(cls: type, *args: Any, **kwargs: Any) -> Any:
        nonlocal within
        own = apply.__get__(None, cls)
        if threading.get_ident() != here or within or not torch.is_grad_enabled():
            return own(*args, **kwargs)
        if cls is checkpoint.CheckpointFunction:
            return reentrant(*args, **kwargs)
        within = True
        try:
            return called(cls, own, *args, **kwargs)
        finally:
            within = False

    return _SingleLevelFunction, "apply", classmethod(instead)


def checkpoints(region: Callable[..., AbstractContextManager]) -> Change:
    """checkpoint(use_reentrant=False) runs its function between the steps of this generator: within a `region`."""
    original, here = checkpoint._checkpoint_without_reentrant_generator, threading.get_ident()

    def generator(fn: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        if threading.get_ident() != here or not torch.is_grad_enabled():
            yield from original(fn, *args, **kwargs)
            return
        preserve_rng_state, context_fn, determinism_check, debug, early_stop = args[:5]
        plain = context_fn is checkpoint.noop_context_fn and not debug
        options = {"preserve_rng_state": preserve_rng_state, "determinism_check": determinism_check}
        with region(plain=plain, early_stop=early_stop, **options):
            yield

    return checkpoint, "_checkpoint_without_reentrant_generator", generator


def no_seeds(error: Callable[[], Exception]) -> Change:
    """A seed would be set once, and not in every call: it raises `error`."""
    return torch.random, "default_generator", _Unseeded(torch.default_generator, error)


class _Unseeded:
    """A generator whose state this thread may not set."""

    def __init__(self, generator: torch.Generator, error: Callable[[], Exception]) -> None:
        self._generator, self._error, self._thread = generator, error, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed", "set_state") and threading.get_ident() == self._thread:
            raise self._error()
        return getattr(self._generator, name)


def symbolic_batches(rows_of: Callable[[Any], Any]) -> Iterator[Change]:
    """A recurrent layer over a packed sequence takes int(batch_sizes[0]) for the batch, which would fix it: it is
    `rows_of(batch_sizes)`, where that is known."""
    for kind, name in ((nn.RNNBase, "get_expected_hidden_size"), (nn.LSTM, "get_expected_cell_size")):
        yield kind, name, _of_rows(vars(kind)[name], rows_of)


def _of_rows(original: Callable[..., Any], rows_of: Callable[[Any], Any]) -> Callable[..., Any]:
    here = threading.get_ident()

    def expected(self: Any, input: Any, batch_sizes: Any) -> Any:
        rows = rows_of(batch_sizes) if threading.get_ident() == here else None
        return original(self, input, batch_sizes) if rows is None else original(self, _Rows(rows), None)

    return expected


class _Rows:
    """As much of a padded input as is asked for its batch."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def size(self, dim: int) -> Any:
        return self._rows


def symbolic_len(shape_env: TraceShapeEnv) -> Change:
    """len(x) must be an int to Python, which would fix the batch: it is x.shape[0].

    A named tuple that is defined during the trace keeps this function for good, but not the environment.
    """
    length, here, asked = builtins.len, threading.get_ident(), weakref.ref(shape_env)

    def symbolic_length(x: Any, /) -> Any:
        env = asked() if isinstance(x, FakeTensor) and threading.get_ident() == here else None
        if env is not None and env.symbolic_len and x.dim():
            env.gave_len |= isinstance(x.shape[0], torch.SymInt)
            return x.shape[0]
        return length(x)

    return builtins, "len", symbolic_length
