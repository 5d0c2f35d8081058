"""A slice's size and place as terms of what is cut: torch 2.11 gets them from us, later versions have their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx.experimental._config as shape_config
from torch._subclasses import FakeTensorMode

from fxopt.torch_internals.shape_env import TraceShapeEnv
from fxopt.torch_internals.slices import sliced_by_terms
from fxopt.torch_internals.symbols import expression

ENDS = ((2, None, 1), (None, 2, 1), (-2, None, 1), (None, -2, 1), (2, 7, 1), (-7, -2, 2), (2, -2, 1), (7, 2, 1))


def test_terms_are_eagers_sizes_at_every_size() -> None:
    environment = TraceShapeEnv()
    rows = environment.size("x", 5, positive=False)

    def at(value: Any, size: int) -> int:
        return value if isinstance(value, int) else int(expression(value).subs(expression(rows), size))

    with FakeTensorMode(shape_env=environment), shape_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        x = torch.empty(rows, 3)
        for start, end, step in ENDS:
            for cut in (sliced_by_terms(x, 0, start, end, step), x[start:end:step]):
                for size in range(9):
                    eager = range(size)[start:end:step]
                    assert at(cut.shape[0], size) == len(eager), (start, end, step, size)
                    assert not eager or at(cut.storage_offset(), size) == 3 * eager[0]
    assert not environment.guards
