"""Tensors of constant content: made once, or once per size, instead of at each call.

A torch.zeros takes 1.1 us, a mask of four operators 5 us and more; finding one that was made before 0.05 us.
"""

from __future__ import annotations

from collections.abc import Callable

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from fxopt.locks import lock
from fxopt.patterns.recipes import Recipe
from fxopt.patterns.sized_constants import KEPT_BYTES, find_sized_constants
from fxopt.rewrites.framework import Editor, Match, Rejected, Replacement, Rewrite
from fxopt.rewrites.sizes import computed
from fxopt.shape.sizes import Size

_KEPT_SIZES = 8  # a server's batch buckets, or full batches and the last one


def made(recipe: Callable[..., Tensor], *sizes: int) -> Tensor:
    """A tensor that any later call may read, whatever mode this one is in."""
    with torch.inference_mode(False), torch.no_grad():
        return recipe(*sizes)


def kept_by_size(recipe: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`recipe` that remembers the last few sizes. Reading takes no lock."""
    kept: dict[tuple[int, ...], Tensor] = {}
    keeping = lock()

    def constant(*sizes: int) -> Tensor:
        tensor = kept.get(sizes)
        return keep(sizes, made(recipe, *sizes)) if tensor is None else tensor

    def keep(sizes: tuple[int, ...], tensor: Tensor) -> Tensor:
        room = KEPT_BYTES - tensor.untyped_storage().nbytes()
        if room < 0:
            return tensor
        with keeping:
            while kept and (len(kept) >= _KEPT_SIZES or _bytes(kept) > room):
                del kept[next(iter(kept))]
            return kept.setdefault(sizes, tensor)

    return constant


def _bytes(kept: dict[tuple[int, ...], Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def replace_constant(editor: Editor, match: Match) -> Replacement:
    recipe: Recipe = match.bound["recipe"]
    if recipe.sizes:
        new, often, why = _per_size(editor, match), "made once per size", f"depends on {_listed(recipe.sizes)} alone"
    else:
        new, often, why = _constant(editor, match), "a constant", "depends on nothing"
    nodes: tuple[Node, ...] = match.bound["nodes"]
    times = f" ({len(nodes)} times)" if len(nodes) > 1 else ""
    return Replacement(dict.fromkeys(nodes, new), f"{' > '.join(recipe.names)}{times}: {often}", why)


def _listed(sizes: tuple[sympy.Expr, ...]) -> str:
    return ", ".join(map(str, sizes))


def _per_size(editor: Editor, match: Match) -> Node:
    recipe: Recipe = match.bound["recipe"]
    sizes = computed(editor, match.bound["sources"], reuse=True)

    def sized_constant(*sizes: Size) -> Tensor:
        return recipe(*sizes)

    call = editor.call(sized_constant, *map(sizes.of, recipe.sizes))
    call.meta["bound"] = kept_by_size(recipe)
    return call


def _constant(editor: Editor, match: Match) -> Node:
    tensor, claimed = made(match.bound["recipe"]), match.anchor.meta["val"]
    if tensor.device != claimed.device:
        raise Rejected(f"expected a tensor on {claimed.device}, found {tensor.device}")
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)  # other streams will read it
    node = editor.constant("sized", tensor)
    node.meta["literal"] = True
    return node


REWRITE = Rewrite(
    "sized_constants",
    find_sized_constants,
    replace_constant,
    why="after the columns: they read off their offsets and defaults how zeros, ones and arange are made",
)
