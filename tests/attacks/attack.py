"""Models written to break a promise, and how they are judged: every call does what the eager twin does."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxopt.config import Config
from fxopt.optimize import optimize
from fxopt.torch_internals.seeds import seed_started

UNCHECKED = Config(verify="off", tune="off")  # nothing hides a wrong rewrite
CONFIGS = {"unchecked": UNCHECKED, "default": Config()}


@dataclass(frozen=True)
class Attack:
    """A model and the calls that it gets, in order.

    Args:
        model: makes the model; called under one seed for the eager model and for the one to optimize.
        calls: each makes the arguments of one call.
        grad: calls are followed by backward(), and gradients are compared.
        between: what the user does to a model after each call.
    """

    model: Callable[[], nn.Module]
    calls: Sequence[Callable[[], tuple]]
    grad: bool = False
    between: Callable[[nn.Module], Any] | None = None

    def check(self, config: Config, prepared: bool = False) -> None:
        """Raises AssertionError at the first difference. `prepared`: captured ahead, on the first call's arguments."""
        eager, twin = _seeded(self.model), _seeded(self.model)
        fast = optimize(twin, config=config)
        if prepared:
            arguments, before = _seeded(self.calls[0]), copy.deepcopy(dict(_state(eager)))
            kept = copy.deepcopy(arguments)
            with contextlib.suppress(Exception):  # the model's own, which the call shows as well
                fast._fxopt.prepare(arguments, {})  # type: ignore[union-attr, operator]
            _same("state after the capture", before, dict(_state(twin)))
            _same("arguments after the capture", kept, arguments)
        for number, call in enumerate(self.calls):
            sides = []
            for model in (eager, fast):
                arguments = _seeded(call, number)
                _seeded(list, 1000 + number)
                sides.append((self._result(model, arguments), arguments, dict(_state(model)), _random_states()))
            for what, expected, found in zip(("result", "arguments", "state", "random states"), *sides, strict=True):
                _same(f"call {number}: {what}", expected, found)
            if self.between:
                self.between(eager)
                self.between(fast)

    def _result(self, model: nn.Module, arguments: tuple) -> Any:
        model.zero_grad(set_to_none=True)
        try:
            with torch.set_grad_enabled(self.grad):
                result = model(*arguments)
                if not self.grad:
                    return result
                outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
                if outputs:
                    torch.autograd.backward(outputs, [_cotangent(t) for t in outputs])
        except Exception as error:
            return type(error)
        leaves = [t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)]
        return result, {n: p.grad for n, p in model.named_parameters()}, [t.grad for t in leaves if t.is_leaf]


def _seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    seed_started(seed)
    random.seed(seed)
    np.random.seed(seed)
    return make()


def _random_states() -> tuple:
    return torch.get_rng_state(), repr(random.getstate()), repr(np.random.get_state()[1].tolist())  # type: ignore[index]


def _cotangent(output: Tensor) -> Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(output.numel())).to(output.dtype)


def _state(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Tensors and plain attributes of all modules."""
    for path, module in model.named_modules():
        for kind in (module._parameters, module._buffers):
            yield from ((f"{path}.{name}", tensor) for name, tensor in kind.items())
        for name, value in vars(module).items():
            if not name.startswith("_") and isinstance(value, (Tensor, int, float, str, list, dict, tuple, set)):
                yield f"{path}.{name}", value


def _same(what: str, expected: Any, found: Any) -> None:
    if isinstance(expected, type) or isinstance(found, type):
        assert isinstance(expected, type) and isinstance(found, type), f"{what}: eager {expected}, optimized {found}"
        assert issubclass(found, expected), f"{what}: eager raises {expected}, optimized {found}"
        return
    left, spec = pytree.tree_flatten(expected)
    right, other = pytree.tree_flatten(found)
    assert spec == other, f"{what}: eager {spec}, optimized {other}"
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        _same_leaf(f"{what}, leaf {index}", a, b)


def _same_leaf(what: str, a: Any, b: Any) -> None:
    if not isinstance(a, Tensor):
        if not isinstance(a, (int, float, str, type(None))):  # an object of each model's own
            return
        assert type(a) is type(b) and (a == b or a != a), f"{what}: eager {a!r}, optimized {b!r}"
        return
    form = lambda t: (tuple(t.shape), t.dtype, t.requires_grad, t.is_contiguous())  # noqa: E731
    assert isinstance(b, Tensor) and form(a) == form(b), f"{what}: eager {form(a)}, optimized {form(b)}"
    if a.is_floating_point():
        tolerance = 64 * torch.finfo(a.dtype).eps
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}")
    else:
        assert torch.equal(a, b), f"{what}: eager {a}, optimized {b}"
