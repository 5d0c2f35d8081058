"""A graph in double precision, with its decisions as eager took them.

Every node runs twice: as it is, and widened to float64. Integers and booleans (bucket numbers, masks, indices)
always come from the first run, so that the reference never looks up another row than eager does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


def double_run(graph: fx.GraphModule, tensors: Sequence[Tensor], wide: Sequence[Tensor]) -> list[Any]:
    """The flat outputs of `graph`, floats as float64.

    Args:
        tensors: state and inputs as they are (they are mutated where the graph mutates them).
        wide: the same, floats in float64.
    """
    interpreter = _Twice(graph)
    pairs = [_Pair(t, w) for t, w in zip(tensors, wide, strict=True)]
    flat, _ = pytree.tree_flatten(interpreter.run(*pairs), is_leaf=_is_pair)
    return [leaf.wide if _is_pair(leaf) else leaf for leaf in flat]


def widen(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype in _NARROW else tensor


class _Pair:
    """A value as the graph computes it, and in double."""

    def __init__(self, plain: Any, wide: Any) -> None:
        self.plain = plain
        self.wide = wide


def _is_pair(value: Any) -> bool:
    return isinstance(value, _Pair)


class _Twice(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        plain_args, plain_kwargs = _take((args, kwargs), "plain")
        random = _is_random(n)
        before = torch.get_rng_state() if random else None
        plain = getattr(self, n.op)(n.target, plain_args, plain_kwargs)
        if n.op != "call_function":  # an opaque submodule, or a constant: no double form of its own
            return _pairs(plain, pytree.tree_map_only(Tensor, widen, plain))
        if before is not None:
            torch.set_rng_state(before)
        wide_args, wide_kwargs = pytree.tree_map_only(torch.dtype, _wide_dtype, _take((args, kwargs), "wide"))
        return _pairs(plain, self.call_function(n.target, wide_args, wide_kwargs))


def _take(values: Any, which: str) -> Any:
    return pytree.tree_map(lambda v: getattr(v, which) if _is_pair(v) else v, values, is_leaf=_is_pair)


def _pairs(plain: Any, wide: Any) -> Any:
    """Tensors of both runs side by side; whatever is no float is the plain run's."""

    def pair(p: Any, w: Any) -> Any:
        if not isinstance(p, Tensor):
            return p
        return _Pair(p, w if p.is_floating_point() or p.is_complex() else p)

    return pytree.tree_map(pair, plain, wide)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in _NARROW else dtype


def _is_random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags
