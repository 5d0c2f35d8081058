"""What is changed for the time of a trace, and what a trace refuses. Other threads see no difference."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

from fxopt.capture.autograd_functions import recorded
from fxopt.capture.checkpointed import Regions
from fxopt.capture.errors import CaptureError
from fxopt.capture.packed_sequences import PackedSequences
from fxopt.capture.settings import change, changed_here
from fxopt.torch_internals import patches
from fxopt.torch_internals.fake_tensors import FakeTensorMode, quieten
from fxopt.torch_internals.python_math import as_terms
from fxopt.torch_internals.python_sizes import as_numbers
from fxopt.torch_internals.scripted import scripted_as_written
from fxopt.torch_internals.shape_env import TraceShapeEnv


def patch(
    mode: FakeTensorMode,
    regions: Regions,
    sequences: PackedSequences,
    spaces: Iterable[dict[str, Any]],
    tracer: Any,
) -> None:
    """Make torch as a trace needs it, until the trace ends; and what these globals of the user's code ask of sizes."""
    quieten(_quiet)
    shape_env: TraceShapeEnv = mode.shape_env  # type: ignore[assignment]
    change(
        [
            patches.no_tensor_meta(),
            patches.contiguous_unasked(),
            patches.overlap_unasked(),
            patches.exact_quotients(),
            patches.autograd_functions(partial(recorded, tracer, mode), regions.reentrant),
            patches.checkpoints(regions.region),
            patches.no_seeds(_sets_seed),
            patches.no_saving_hooks(_saves_otherwise),
            patches.symbolic_len(shape_env),
            *patches.symbolic_batches(sequences.rows_of),
            patches.OBLIVIOUS,
            *scripted_as_written(_scripted),
            *as_numbers(spaces),
            *as_terms(spaces, tracer),
        ]
    )


def refuse_to_print(*args: Any, **kwargs: Any) -> None:
    raise CaptureError("prints or logs, which a graph would not do again")


def _scripted(what: str) -> CaptureError:
    return CaptureError(f"calls {what}, whose operators no graph of the forward sees")


def _sets_seed() -> CaptureError:
    return CaptureError("sets torch's random state, which a graph would do only once")


def _saves_otherwise() -> CaptureError:
    return CaptureError("has hooks of its own around what backward needs, and a graph saves that as usual")


def _quiet(record: logging.LogRecord) -> bool:
    """What a trace of this thread logs is kept back."""
    return not changed_here()
