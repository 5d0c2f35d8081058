"""What a user asks of :func:`fxopt.optimize`, put into words where it cannot be meant."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from fxopt.config import Config
from fxopt.rewrites import PASSES


def check(model: nn.Module, config: Config) -> None:
    """Names are those of passes and of submodules.

    Raises:
        TypeError: `config` is no Config.
        ValueError: a name that nothing has.
    """
    if not isinstance(config, Config):
        raise TypeError(f"fxopt.optimize: config: expected an fxopt.Config, found {type(config).__name__}")
    _known("disable", config.disable, (name for each in PASSES for name in each.names), "passes")
    _known("leaves", config.leaves, (path for path, _ in model.named_modules()), "submodules, as in named_modules()")


def arguments_of(model: nn.Module, example_inputs: Any) -> tuple[tuple, dict[str, Any]]:
    """Example inputs as (args, kwargs): a tuple or list is positional, a dict has keywords, a tensor stands alone.

    Raises:
        TypeError: none of these, or keywords that the model's forward does not take.
        ValueError: the model has no values to run on.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"fxopt.optimize: expected a model with values, found {name!r} on device meta: load its state first, "
                "or leave out example_inputs, and it is captured at its first call"
            )
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), _keywords(model, example_inputs)
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    found = type(example_inputs).__name__
    if isinstance(example_inputs, Config):
        raise TypeError("fxopt.optimize: example_inputs: found a Config, which is the third argument: config=...")
    raise TypeError(
        f"fxopt.optimize: example_inputs: expected a tuple of positional arguments, a dict of keyword arguments or a "
        f"tensor, found {found}; for a forward of one {found} write (inputs,)"
    )


def _keywords(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        inspect.signature(model.forward).bind(**inputs)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"fxopt.optimize: example_inputs: a dict holds keyword arguments, and forward() does not take these: "
            f"{error}; for a forward of one dict write (inputs,)"
        ) from None
    return dict(inputs)


def _known(field: str, names: Iterable[str], known: Iterable[str], what: str) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"Config.{field}: expected names of {what}, found {name!r}{hint}")
