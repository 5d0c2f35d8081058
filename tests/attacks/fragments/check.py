"""One fragment in two worlds of its own, eager and optimized: every call does the same in both."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch import Tensor

from fxopt.config import Config
from fxopt.optimize import optimize
from fxopt.torch_internals.seeds import seed_started
from tests.attacks.fragments.program import Fragment

_SIZES = (3, 3, 4, 2, 3, 1)


def failure(fragment: Fragment, config: Config) -> str:
    """What differs first; "" where nothing does."""
    try:
        eager, fast = _world(fragment, "eager"), _world(fragment, "fast")
    except (TypeError, ValueError, SyntaxError):  # a list as a key, quotes within quotes
        return ""
    try:
        fast["m"] = optimize(fast["m"], config=config)
        for number, size in enumerate(_SIZES):
            x = torch.arange(4.0 * size).reshape(size, 4) / 4 - 1
            for again in range(2):
                expected, found = _called(eager["m"], x), _called(fast["m"], x)
                if not _same(expected, found):
                    done = "; ".join(fragment.changes[:number])
                    return f"call {number}.{again} after {done}: eager {_short(expected)}, optimized {_short(found)}"
            if number < len(fragment.changes):
                outcomes = [_done(fragment.changes[number], world) for world in (eager, fast)]
                if outcomes[0] != outcomes[1]:
                    return f"{fragment.changes[number]}: eager {outcomes[0]}, optimized {outcomes[1]}"
    finally:
        for name in [name for name in sys.modules if name.startswith("fragment_of_")]:
            del sys.modules[name]
    return ""


def _world(fragment: Fragment, side: str) -> dict[str, Any]:
    """A module of its own with a model `m`, and one of settings beside it."""
    made = {}
    for name in (f"fragment_of_{side}", f"fragment_of_{side}_settings"):
        made[name] = sys.modules[name] = types.ModuleType(name)
    space = vars(sys.modules[f"fragment_of_{side}"])
    space["other_name"] = f"fragment_of_{side}_settings"
    exec(fragment.source.replace("$other", space["other_name"]), space)
    seed_started(0)
    exec("m = Model()", space)
    return space


def _called(model: Any, x: Tensor) -> Any:
    try:
        with torch.no_grad():
            return model(x)
    except Exception as error:
        return type(error).__name__


def _done(change: str, space: dict[str, Any]) -> str:
    try:
        exec(change.replace("$other", space["other_name"]), space)
    except Exception as error:
        return type(error).__name__
    return ""


def _same(expected: Any, found: Any) -> bool:
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return type(expected) is type(found) and (isinstance(expected, Tensor) or expected == found)
    if (expected.shape, expected.dtype) != (found.shape, found.dtype):
        return False
    return torch.allclose(expected.double(), found.double(), rtol=1e-5, atol=1e-5, equal_nan=True)


def _short(result: Any) -> str:
    return (
        f"{result.dtype}{list(result.shape)} {result.flatten()[:3].tolist()}" if isinstance(result, Tensor) else result
    )
