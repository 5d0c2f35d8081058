"""One random model of columns: the optimized one is the eager one, at every size, forward and backward."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fxopt.config import Config
from fxopt.kernels.by_rows.many import looking
from fxopt.optimize import optimize
from fxopt.runtime import dispatcher_of
from fxopt.runtime.entry import Entry
from tests.fuzz.placed import CPU, elsewhere, moved, on_cpu, on_default
from tests.properties.compare import assert_same, outcome
from tests.properties.inputs import Sizes
from tests.properties.programs import Program

OTHERS = (Sizes(0, 2), Sizes(1, 1), Sizes(2, 0), Sizes(7, 6))


def rewrites(model: nn.Module, program: Program) -> int:
    """Calls of the columns operator in the one capture of an optimized model; none where torch's own fake operators
    refuse what its real ones do (ids of uint8 in an empty bag). There are more captures only where a length L meets a
    fixed size, or where results lie as the inputs do."""
    entries = model._fxopt.entries  # type: ignore[union-attr]
    if all(one.executable is None and one.findings.eager_reason.startswith("the model's forward: ") for one in entries):
        return 0
    entry, *others = entries
    assert not others or all(_is_special(one, program) for one in entries), [e.findings.signature for e in entries]
    if entry.executable is None and "expected the last offset to be the number of ids" in entry.findings.eager_reason:
        return 0
    assert entry.executable is not None, entry.findings.eager_reason
    return sum(len(ran.changes) for ran in entry.findings.passes if ran.name == "embedding_columns")


def _is_special(entry: Entry, program: Program) -> bool:
    """Whether a capture serves one length alone, or inputs that lie in one way."""
    if entry.executable is None:
        return False
    guards = entry.executable.capture.guards
    return bool(guards.whole or guards.torn) or any(program.inputs[i].dims[d] == "L" for (i, d), _ in guards.static)


def check(program: Program, seen: Counter[str]) -> bool:
    """Eager against optimized at the captured sizes and at two others; one capture serves all but an empty batch.

    Every other graph is computed as a large batch is. False for a model that rejects its own example:
    lengths that do not fit.
    """
    if elsewhere():  # where ids behind the last offset are in no bag: DESIGN.md, Known limits
        program.inputs = [replace(x, spare=False) for x in program.inputs]
    if any(x.spare for x in program.inputs):
        program.grad = False  # torch's backward reads memory that it never wrote, and crashes
    with looking(pretended=seen["graphs"] % 2 == 1):
        return _check(program, seen)


def _check(program: Program, seen: Counter[str]) -> bool:
    device = torch.get_default_device()
    arguments_of, made = on_default(program.arguments), on_cpu(program.model)
    eager, model = moved(made(), device), moved(made(), device)
    if elsewhere() and (_pads_infinities(program) or not _is_harmless(program, program.sizes, 0)):
        return False
    example = arguments_of(program.sizes, 0)
    try:
        with torch.set_grad_enabled(program.grad):
            fast = optimize(model, config=Config(verify="off", tune="off"))
            dispatcher_of(fast).prepare(example)  # with gradients also in eval mode
    except (RuntimeError, IndexError) as error:  # the model's own
        assert not elsewhere(), f"optimize raises {error!r}, eager nothing"
        assert isinstance(outcome(eager, example, program.grad).error, type(error))
        return False
    seen["graphs"] += 1
    seen["optimized"] += rewrites(fast, program) > 0
    first = seen["graphs"] % len(OTHERS)
    others = sorted((OTHERS[first], OTHERS[first - 1]), key=lambda sizes: sizes.batch == 0)
    layouts = set[tuple[bool, ...]]()
    for seed, sizes in enumerate((program.sizes, *others)):
        if sizes.batch == 0:
            rewrites(fast, program)  # still the one capture
        if elsewhere() and not _is_harmless(program, sizes, seed):
            seen["left out"] += 1
            continue
        arguments = arguments_of(sizes, seed)
        layouts.add(tuple(x.is_contiguous() for x in tree_leaves(arguments)))
        expected = outcome(eager, arguments, program.grad)
        if _is_torchs_own(expected.error):
            seen["left out"] += 1
            continue
        assert_same(expected, outcome(fast, arguments, program.grad), _eps(program))
        seen["runs"] += 1
        seen["raised"] += expected.error is not None
    # Strided inputs may be contiguous at batch 0 or 1, each by itself, and such calls have a capture of their own.
    assert len(fast._fxopt.entries) <= max(2, len(layouts))  # type: ignore[union-attr, arg-type]
    return True


def _is_torchs_own(error: Exception | None) -> bool:
    """No kernel for a dtype on this device, or a number that a half cannot hold, which others hold as infinity."""
    return isinstance(error, NotImplementedError) or (elsewhere() and "without overflow" in str(error))


def _pads_infinities(program: Program) -> bool:
    """A documented limit: torch's CUDA kernel multiplies a padded row's 0 by its weight, ours reads neither."""
    return "padding_idx" in repr(program) and any(x.wild and x.role == "weights" for x in program.inputs)


def _eps(program: Program) -> float:
    """Of the narrowest table: what it rounds may be joined with wider floats."""
    return max((torch.finfo(t.dtype).eps for t in program.tables.values()), default=0.0)


def _is_harmless(program: Program, sizes: Sizes, seed: int) -> bool:
    """Whether eager raises nothing on the CPU; another device may be lost by what raises."""
    with CPU:
        return outcome(program.model(), program.arguments(sizes, seed), program.grad).error is None
