"""What is made of its attributes alone is what the registered function makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from fxopt.runtime.flatten import rebuilder
from fxopt.runtime.instances import attributes_of

torchrec = pytest.importorskip("torchrec")


def test_results_of_torchrec() -> None:
    jagged = torchrec.JaggedTensor(torch.arange(3), None, torch.tensor([1, 2]))
    keyed = torchrec.KeyedTensor(["a", "b"], [1, 2], torch.ones(4, 3))
    result = {"x": jagged, "y": [keyed, torch.ones(1)]}
    flat, spec = pytree.tree_flatten(result)
    rebuilt = rebuilder(spec)(flat)
    for one, other in ((rebuilt["x"], jagged), (rebuilt["y"][0], keyed)):
        assert type(one) is type(other)
        assert vars(one).keys() == vars(other).keys()
        assert all(vars(one)[name] is value for name, value in vars(other).items())
    assert rebuilder(spec)(flat)["x"] is not rebuilt["x"]
    assert rebuilt["y"][0]["b"].shape == (4, 2) and rebuilt["x"].offsets().tolist() == [0, 1, 3]


def test_constructors_that_do_more_run() -> None:
    class Own(torchrec.JaggedTensor):
        made = 0

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            Own.made += 1

    pytree.register_pytree_node(
        Own, lambda own: ([own._values, own._lengths], None), lambda v, _: Own(v[0], None, v[1])
    )
    assert attributes_of(Own, None, 2) is None
    flat, spec = pytree.tree_flatten(Own(torch.ones(1), None, torch.tensor([1])))
    rebuilder(spec)(flat)
    assert Own.made == 2
    assert attributes_of(torchrec.KeyedJaggedTensor, ["a"], 6) is None
    assert attributes_of(torchrec.JaggedTensor, None, 4) == {"_values": 0, "_weights": 1, "_lengths": 2, "_offsets": 3}
