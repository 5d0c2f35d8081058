"""Every operator of ours with arguments that nobody should pass: `python -m tests.kernels.hostile [--small]`.

Each tensor in its turn becomes empty, expanded, overlapping, shifted, another dtype, another shape; each number of a
plan becomes a negative one, a huge one, its neighbour. A call may raise, or give what PyTorch gives; it may not crash.
"""

from __future__ import annotations

import argparse
import faulthandler
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fxopt.kernels.words import text_of, words_in
from tests.kernels.calls import Call, calls

SMALL = (-1, 0, 1, 2, 3, 5, 9, 100)
HUGE = (255, 2**31 - 1, 2**31, 2**33, 2**40, 2**61, 2**63 - 1, -(2**31), -(2**62), -(2**63))
SECONDS = 60  # of one call


def tensors_like(x: Tensor, huge: bool) -> Iterator[tuple[str, Tensor]]:
    """x in other shapes, strides, dtypes; `same`: with its own values."""
    yield "same, shifted", torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    yield "same, spread", torch.stack([x, x], -1)[..., 0]
    yield "same, turned", x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    for dim, size in enumerate(x.shape):
        for other in (0, 1, max(size - 1, 0), size + 1):
            yield f"dim {dim} of {other}", _resized(x, dim, other)
        yield f"dim {dim} expanded", x.narrow(dim, 0, min(size, 1)).expand(x.shape) if size else x
        for many in (2**45,) if huge and size else ():
            yield f"dim {dim} of {many}", x.narrow(dim, 0, 1).expand(*x.shape[:dim], many, *x.shape[dim + 1 :])
    if x.numel():
        yield "overlapping", x.flatten()[:1].expand(2 * x.numel()).as_strided(x.shape, [0] * x.dim())
        yield "windows", torch.cat([x.flatten()] * 2).as_strided(x.shape, [1] * x.dim())
    yield "empty", x.new_empty(0)
    yield "one more dim", x.unsqueeze(0)
    yield "one dim less", x.flatten(0, 1) if x.dim() > 1 else x.sum()
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.complex64):
        yield str(dtype), x.to(dtype)
    if not x.is_floating_point():
        for value in (-1, 7, 2**31, 2**62, -(2**62)):
            yield (
                f"values {value}",
                torch.full_like(x, min(max(value, torch.iinfo(x.dtype).min), torch.iinfo(x.dtype).max))
                if x.dtype != torch.bool
                else ~x,
            )
        yield "falling", x.flip(0) if x.dim() else x
    else:
        yield "not finite", torch.full_like(x, float("nan"))
        yield "infinite", torch.full_like(x, float("-inf"))
    yield "sparse", x.to_sparse() if x.is_floating_point() and x.dim() == 2 else x
    yield "meta", x.to("meta")


def _resized(x: Tensor, dim: int, size: int) -> Tensor:
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return torch.ones(shape, dtype=x.dtype) if x.dtype != torch.bool else torch.ones(shape, dtype=torch.bool)


def plans_like(plan: Any, huge: bool) -> Iterator[tuple[str, Any]]:
    """A plan with one number changed, cut, or longer."""
    words = plan.tolist() if isinstance(plan, Tensor) else words_in(plan) if isinstance(plan, str) else list(plan)
    made = torch.tensor if isinstance(plan, Tensor) else text_of if isinstance(plan, str) else list
    for number, word in enumerate(words):
        others = (*SMALL, word + 1, word - 1, *(HUGE if huge else ()))
        halves = (word ^ (1 << bit) for bit in range(0, 63, 3)) if isinstance(plan, Tensor) else ()
        for other in dict.fromkeys((*others, *halves)):
            if -(2**63) <= other < 2**63 and other != word:
                yield f"word {number} is {other}", made([*words[:number], other, *words[number + 1 :]])
    for length in range(len(words)):
        yield f"{length} words", made(words[:length])
    yield "more words", made(words + words)
    if isinstance(plan, str):
        yield from (
            ("no numbers", text) for text in ("", ",", plan + ",", plan + ",x", "1.5", "9" * 30, plan.replace(",", ";"))
        )


def attacks(call: Call, huge: bool) -> Iterator[tuple[str, tuple[Any, ...], bool]]:
    """What is hostile, the arguments, and whether the plan is as it was."""
    yield "nothing", call.arguments, True
    for place, argument in enumerate(call.arguments):
        if place in call.plans:
            for what, other in plans_like(argument, huge):
                yield f"plan: {what}", (*call.arguments[:place], other, *call.arguments[place + 1 :]), False
            continue
        for what, other in _arguments_like(argument, huge):
            yield f"argument {place}: {what}", (*call.arguments[:place], other, *call.arguments[place + 1 :]), True
    yield from _together(call)


def _arguments_like(argument: Any, huge: bool) -> Iterator[tuple[str, Any]]:
    if isinstance(argument, Tensor):
        yield from tensors_like(argument, huge)
    elif isinstance(argument, list):
        yield "[]", []
        yield "doubled", argument * 2
        for number, item in enumerate(argument):
            yield f"without {number}", argument[:number] + argument[number + 1 :]
            for what, other in _arguments_like(item, huge):
                yield f"{number}: {what}", [*argument[:number], other, *argument[number + 1 :]]
    elif isinstance(argument, int) and not isinstance(argument, bool):
        for other in (*SMALL, *(HUGE if huge else ())):
            yield str(other), other


def _together(call: Call) -> Iterator[tuple[str, tuple[Any, ...], bool]]:
    """All sizes that are one number, at once: a batch of 0, an empty history, vectors of no width."""
    leaves, spec = tree_flatten([argument for place, argument in enumerate(call.arguments) if place not in call.plans])
    for size in sorted({size for x in leaves if isinstance(x, Tensor) for size in x.shape}):
        for to in (0, 1):
            changed = [_all_of(x, size, to) if isinstance(x, Tensor) else x for x in leaves]
            rest = iter(tree_unflatten(changed, spec))
            arguments = tuple(a if place in call.plans else next(rest) for place, a in enumerate(call.arguments))
            yield f"{size} becomes {to}", arguments, True


def _all_of(x: Tensor, size: int, to: int) -> Tensor:
    return x.new_zeros([to if extent == size else extent for extent in x.shape]) if size in x.shape else x


def told(call: Call, arguments: tuple[Any, ...], compared: bool) -> str | None:
    """What is wrong with the answer; None where nothing is."""
    leaves = tree_flatten(arguments)[0]
    try:
        found = call(*arguments)
    except Exception:
        return None
    if (
        not compared
        or call.reference is None
        or any(isinstance(x, Tensor) and (x.is_meta or x.is_sparse) for x in leaves)
    ):
        return None
    try:
        expected = call.reference(*arguments)
    except Exception as error:
        return f"gives a result where PyTorch raises {type(error).__name__}: {str(error)[:200]}"
    return None if expected is None else _difference(found, expected)


def _difference(found: Any, expected: Any) -> str | None:
    ours, theirs = ([x for x in tree_flatten(side)[0] if x is not None] for side in (found, expected))
    for y, reference in zip(ours, theirs, strict=True):
        if y.shape != reference.shape:
            return f"gives {list(y.shape)}, PyTorch {list(reference.shape)}"
        if not torch.allclose(y.double(), reference.double(), 1e-2, 1e-3, equal_nan=True):
            return f"is {(y.double() - reference.double()).abs().nan_to_num(9e9).max()} off"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.hostile", description=__doc__)
    parser.add_argument("--small", action="store_true", help="no huge numbers, which a sanitizer's allocator dies of")
    parser.add_argument("--share", type=int, default=1, help="every n-th attack alone")
    parser.add_argument(
        "-k", default=".*", metavar="NAMES", help="operators of these names alone, a regular expression"
    )
    args = parser.parse_args()
    if not args.small:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**32, used + 2**32))
    count = wrong = 0
    for call in calls():
        if not re.fullmatch(args.k, call.name):
            continue
        call.load()
        huge = call.native and not args.small
        for number, (what, arguments, same_plan) in enumerate(attacks(call, huge)):
            if number % args.share:
                continue
            print(f"\r{call.name}: {what}", end="\033[K", file=sys.stderr, flush=True)
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            found = told(call, arguments, same_plan and not ("infinite" in what and call.name.endswith("_backward")))
            faulthandler.cancel_dump_traceback_later()
            count += 1
            if found:
                wrong += 1
                print(f"{call.name}, {what}: {found}", flush=True)
    print(f"{count} calls, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
