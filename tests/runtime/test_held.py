"""What is kept of a call's effects is what was there when the call began, also where a look before it saw the same."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fxopt.runtime import held
from fxopt.runtime.held import Attributes


class Slots:
    __slots__ = ("value",)


class Own(dict):
    pass


class OwnSet(set):
    pass


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.none = 0, None
        self.numbers, self.nested, self.inner = [1, 2], {"a": [1], "b": {"c": [2]}}, SimpleNamespace(x=[3], y=4)
        self.order, self.names, self.queue = OrderedDict(a=1, b=2), {"a", "b"}, deque([1, 2])
        self.own, self.own_set, self.slots, self.array = Own(a=[1]), OwnSet("ab"), Slots(), np.zeros(3)
        self.slots.value = [1]
        self.tensor, self.tensors = torch.zeros(2), [torch.zeros(2)]
        self.register_buffer("total", torch.zeros(2))


NAMES = (set(vars(Holder())) - set(vars(nn.Module()))) | {"_buffers"}
CHANGES: dict[str, Callable[[Holder], Any]] = {
    "a number": lambda m: setattr(m, "count", m.count + 1),
    "a container in place of None": lambda m: setattr(m, "none", [1]),
    "a new attribute": lambda m: setattr(m, "new", 1),
    "a list": lambda m: m.numbers.append(3),
    "an item": lambda m: m.numbers.__setitem__(0, 7),
    "a list within": lambda m: m.nested["b"]["c"].append(3),
    "a key": lambda m: m.nested.update(d=1),
    "an order": lambda m: m.order.move_to_end("a"),
    "an order of a dict": lambda m: m.nested.update(a=m.nested.pop("a")),
    "a set": lambda m: m.names.add("c"),
    "a queue": lambda m: m.queue.rotate(1),
    "a class around dict": lambda m: m.own["a"].append(2),
    "a class around set": lambda m: m.own_set.add("c"),
    "an object": lambda m: setattr(m.inner, "y", m.inner.y + 1),
    "a list in an object": lambda m: m.inner.x.append(4),
    "a slot": lambda m: setattr(m.slots, "value", [2]),
    "a list in a slot": lambda m: m.slots.value.append(2),
    "an array": lambda m: m.array.__iadd__(1),
    "a tensor": lambda m: m.tensor.add_(1),
    "data of a tensor": lambda m: m.tensors[0].data.add_(1),
    "a buffer": lambda m: m.total.add_(1),
    "another buffer": lambda m: setattr(m, "total", m.total + 1),
}


def seen(value: Any) -> Any:
    """All that is in it, in order."""
    if isinstance(value, (Tensor, np.ndarray)):
        return value.tolist()
    if isinstance(value, dict):
        return [(key, seen(item)) for key, item in value.items()]
    if isinstance(value, (list, deque)):
        return list(map(seen, value))
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, Slots):
        return seen(value.value)
    return seen(vars(value)) if isinstance(value, (SimpleNamespace, nn.Module)) else value


@pytest.mark.parametrize("before", CHANGES)
def test_what_was_there_when_a_call_began_is_put_back(before: str) -> None:
    model = Holder()
    attributes = Attributes({model: NAMES})
    for _ in range(2):
        attributes.now()
    for change in CHANGES.values():  # one of a user's, between two calls; then all of a call's
        CHANGES[before](model)
        began, was = attributes.now(), seen(model)
        change(model)
        for other in CHANGES.values():
            other(model)
        assert seen(model) != was
        began.put_back()
        assert seen(model) == was


def test_what_is_as_it_was_is_not_gone_through_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, looks = Holder(), list[int]()
    plain = NAMES - {"own_set"}  # whose items a class of its own gives
    attributes, inside = Attributes({model: plain}), held._Inside
    monkeypatch.setattr(held, "_Inside", lambda behind: looks.append(0) or inside(behind))
    attributes.now()
    looks.clear()
    for _ in range(3):
        model.count += 1
        model.array += 1
        model.total += 1
        attributes.now()
    assert not looks


@pytest.mark.parametrize("kept", [torch.zeros(held._LITTLE), torch.ones(2, requires_grad=True).exp()])
def test_nothing_that_is_large_or_has_a_history_is_held_until_the_next_call(kept: Tensor) -> None:
    model = Holder()
    attributes = Attributes({model: NAMES})
    model.tensors = [kept]
    attributes.now()
    assert not attributes._inside.tensors
    before = copy.deepcopy(seen(model))
    began = attributes.now()
    model.tensors.append(torch.ones(1))
    began.put_back()
    assert seen(model) == before
