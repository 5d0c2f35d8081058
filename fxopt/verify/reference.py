"""A graph in double precision, with its decisions as eager took them.

Nodes run twice: as they are, and with floats widened to float64. Integers and booleans (bucket numbers, masks,
indices) always come from the first run, so that the reference never looks up another row than eager does. A table is
widened row by row as it is looked up: a model's tables in float64 would not be worth the time, or the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxopt.capture.effects import StoreAttribute

aten = torch.ops.aten
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_COPIES = (aten.embedding.default, aten.index_select.default, aten.index.Tensor, aten.gather.default)
_BAGS = (aten.embedding_bag.default, aten.embedding_bag.padding_idx)

Widen = Callable[[Tensor], Tensor]
Move = Callable[[Tensor, torch.dtype], Tensor]


def double_run(
    graph: fx.GraphModule,
    tensors: Sequence[Tensor],
    widen: Widen,
    known: Sequence[Tensor | None],
    move: Move | None = None,
) -> tuple[list[Any], list[Tensor | None]]:
    """The flat outputs of `graph` with floats as float64, and the float64 forms of `tensors` afterwards; stores hold
    what they are given as float64, too.

    Args:
        tensors: state and inputs as they are (they are mutated where the graph mutates them).
        widen: makes a float64 copy of a tensor, or of some of its rows.
        known: float64 forms that exist already.
        move: puts another value in place of each one that is computed, given the dtype that it has in the graph.
    """
    pairs = [_Pair(t, k, widen) if t.is_floating_point() else t for t, k in zip(tensors, known, strict=True)]
    flat, _ = pytree.tree_flatten(_Twice(graph, move).run(*pairs), is_leaf=_is_pair)
    outputs = [leaf.wide if _is_pair(leaf) else leaf for leaf in flat]
    return outputs, [pair.known if isinstance(pair, _Pair) else None for pair in pairs]


class _Pair:
    """A float tensor as the graph computes it, and in double (made when it is first asked for)."""

    def __init__(self, plain: Tensor, known: Tensor | None, widen: Widen) -> None:
        self.plain = plain
        self.known = known
        self.widen = widen

    @property
    def wide(self) -> Tensor:
        if self.known is None:
            self.known = self.widen(self.plain)
        return self.known

    @property
    def rounded(self) -> Tensor:
        return self.wide.to(self.plain.dtype)


def _is_pair(value: Any) -> bool:
    return isinstance(value, _Pair)


class _Twice(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, move: Move | None) -> None:
        super().__init__(graph)
        self.move = move

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op == "call_module" and isinstance(self.fetch_attr(str(n.target)), StoreAttribute):
            return self.call_module(str(n.target), *_take((args, kwargs), "wide"))
        plain = partial(getattr(self, n.op), n.target, *_take((args, kwargs), "plain"))
        if n.op != "get_attr" and not _gives_floats(n):  # a constant tells itself: a sparse one has no fake value
            return plain()
        read = any(map(_is_pair, pytree.tree_leaves((args, kwargs), is_leaf=_is_pair)))
        if (
            n.op != "call_function" or not read
        ):  # an opaque submodule, a constant, torch.ones: no double form of its own
            return pytree.tree_map_only(
                Tensor, lambda t: _Pair(t, None, widened) if t.is_floating_point() else t, plain()
            )
        table = args[0] if args and _is_pair(args[0]) and args[0].known is None else None
        if table is not None and n.target in _COPIES:
            rows = plain()
            return _Pair(rows, table.widen(rows), table.widen)
        if table is not None and n.target in _BAGS:
            args = _rows_in_use(table, *args[1:])
        widely = _widely(args, kwargs)  # made before `plain` writes to any
        wide = partial(self._in_double, n.target, args, kwargs, *widely)
        return _pairs(*_with_equal_randomness(n, plain, wide), None if _gives_an_alias(n) else self.move)

    def _in_double(self, target: Any, args: Any, kwargs: Any, wide_args: Any, wide_kwargs: Any) -> Any:
        """Of an operator that has no code for float64, as some of FBGEMM's: what it gives for the values rounded."""
        try:
            return self.call_function(target, wide_args, wide_kwargs)
        except RuntimeError:
            if getattr(getattr(target, "_schema", None), "is_mutable", True):
                raise
            rounded = self.call_function(target, *_take((args, kwargs), "rounded"))
            return pytree.tree_map_only(Tensor, widened, rounded)


def _with_equal_randomness(node: fx.Node, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    before = torch.get_rng_state() if random else None
    result = first()
    if before is not None:
        torch.set_rng_state(before)
    return result, second()


def _gives_floats(node: fx.Node) -> bool:
    values = pytree.tree_leaves(node.meta.get("val", torch.empty(0, device="cpu")))
    return any(isinstance(value, Tensor) and value.is_floating_point() for value in values)


def _gives_an_alias(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and any(r.alias_info for r in node.target._schema.returns)


def widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype in _NARROW else tensor


def _rows_in_use(table: _Pair, indices: Any, *rest: Any) -> tuple:
    """embedding_bag's arguments with a table of only the rows looked up. The last of nine is padding_idx."""
    rows, inverse = _plain(indices).unique(return_inverse=True)
    if len(rest) >= 7 and rest[6] is not None and rest[6] >= 0:
        at = (rows == rest[6]).nonzero()
        rest = (*rest[:6], int(at) if at.numel() else None, *rest[7:])
    return (table.widen(table.plain[rows]), inverse, *rest)


def _plain(value: Any) -> Any:
    return value.plain if _is_pair(value) else value


def _take(values: Any, which: str) -> Any:
    return pytree.tree_map(lambda v: getattr(v, which) if _is_pair(v) else v, values, is_leaf=_is_pair)


def _widely(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return pytree.tree_map_only(torch.dtype, _wide_dtype, _take((args, kwargs), "wide"))


def _pairs(plain: Any, wide: Any, move: Move | None) -> Any:
    """Floats of both runs side by side; whatever is no float is the plain run's."""

    def pair(p: Any, w: Any) -> Any:
        if not isinstance(p, Tensor) or not p.is_floating_point():
            return p
        return _Pair(p, move(w, p.dtype) if move is not None else w, widened)

    return pytree.tree_map(pair, plain, wide)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in _NARROW else dtype
