"""A slice's size and place as terms of what is cut, which hold wherever the guards do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx.experimental._config as shape_config
from torch._subclasses import FakeTensorMode

from fxopt.torch_internals.shape_env import TraceShapeEnv
from fxopt.torch_internals.slices import sliced_by_terms
from fxopt.torch_internals.symbols import expression

ENDS = ((2, None, 1), (None, 2, 1), (-2, None, 1), (None, -2, 1), (2, 7, 1), (-7, -2, 2), (2, -2, 1), (7, 2, 1))


@pytest.mark.parametrize("hint", [1, 3, 5, 8])
@pytest.mark.parametrize(("start", "end", "step"), ENDS)
def test_terms_are_eagers_sizes_wherever_the_guards_hold(start, end, step, hint) -> None:
    environment = TraceShapeEnv()
    rows = environment.size("x", hint, positive=False)
    symbol = expression(rows)

    def at(value: Any, size: int) -> int:
        return value if isinstance(value, int) else int(expression(value).subs(symbol, size))

    with FakeTensorMode(shape_env=environment), shape_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        x = torch.empty(rows, 3)
        for cut in (sliced_by_terms(x, 0, start, end, step), x[start:end:step]):
            served = [n for n in range(12) if all(guard.expr.subs(symbol, n) for guard in environment.guards)]
            assert hint in served and (hint < 5 or len(served) > 3)
            for size in served:
                eager = range(size)[start:end:step]
                assert at(cut.shape[0], size) == len(eager), size
                assert not eager or at(cut.storage_offset(), size) == 3 * eager[0]


def test_a_cut_that_differs_for_no_items_alone_asks_nothing() -> None:
    environment = TraceShapeEnv()
    rows = environment.size("x", 5, positive=False)
    with FakeTensorMode(shape_env=environment), shape_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        x = torch.empty(rows, 3)
        assert [sliced_by_terms(x, 0, *ends).dim() for ends in ((1,), (None, -1), (None, 1), (-1,))] == [2] * 4
    assert not environment.guards
