"""Lookups within `CheckedLookups` raise where a GPU would end the process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxopt.shape.lookups import CheckedLookups

TABLE = torch.randn(4, 3)
LOOKUPS: dict[str, Callable[[Tensor], Tensor]] = {
    "embedding": lambda ids: F.embedding(ids, TABLE),
    "embedding_bag": lambda ids: F.embedding_bag(ids, TABLE, torch.tensor([0])),
    "index_select": lambda ids: TABLE.index_select(0, ids),
    "gather": lambda ids: TABLE.gather(0, ids[:, None]),
    "scatter": lambda ids: torch.zeros(4, 3).scatter(0, ids[:, None], 1.0),
    "scatter_add": lambda ids: torch.zeros(4, 3).scatter_add(0, ids[:, None], torch.ones(len(ids), 1)),
    "index_add": lambda ids: torch.zeros(4, 3).index_add(0, ids, torch.ones(len(ids), 3)),
    "index": lambda ids: TABLE[ids],
    "index of the second axis": lambda ids: TABLE.t()[:, ids],
    "index_put": lambda ids: torch.zeros(4, 3).index_put((ids,), torch.ones(3)),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_only_integers_in_range(name: str) -> None:
    look = LOOKUPS[name]
    with CheckedLookups():
        look(torch.tensor([0, 3]))
        with pytest.raises(IndexError, match="out of range along axis"):
            look(torch.tensor([0, 4]))
        if name.startswith("index") and name not in ("index_select", "index_add"):
            look(torch.tensor([-4, 3]))
        with pytest.raises(IndexError, match="out of range along axis"):
            look(torch.tensor([0, -1 if name in ("gather", "scatter", "embedding") else -5]))


def test_masks_are_no_integers() -> None:
    with CheckedLookups():
        assert TABLE[TABLE > 9].numel() == 0
        TABLE.masked_scatter(TABLE > 0, TABLE)


def test_what_nobody_knows_is_refused() -> None:
    with CheckedLookups(), pytest.raises(IndexError, match="nobody knows"):
        TABLE.take(torch.tensor([0]))
