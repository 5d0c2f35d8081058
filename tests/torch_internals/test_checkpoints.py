"""torch.utils.checkpoint, as a trace takes it over."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils.checkpoint import checkpoint

from fxopt.torch_internals import patches

USED = "fxopt/capture/checkpointed.py"


def test_both_kinds_of_checkpoint_tell_a_trace() -> None:
    seen: list[Any] = []

    @contextlib.contextmanager
    def region(**options: Any) -> Iterator[None]:
        seen.append(options)
        yield

    def reentrant(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        seen.append(preserve_rng_state)
        return function(*args)

    x = torch.ones(2, requires_grad=True)
    changes = [patches.checkpoints(region), patches.autograd_functions(AssertionError, reentrant)]
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(mock.patch.object(*change))
        checkpoint(torch.exp, x, use_reentrant=False, preserve_rng_state=False)
        checkpoint(torch.exp, x, use_reentrant=False, debug=True)
        checkpoint(torch.exp, x, use_reentrant=True)
    plain, debugging, last = seen
    assert plain["plain"] and not plain["preserve_rng_state"], f"use_reentrant=False: {USED}"
    assert not debugging["plain"] and last is True, f"debug=True, use_reentrant=True: {USED}"
    assert plain.keys() == {"plain", "preserve_rng_state", "determinism_check", "early_stop"}, USED
