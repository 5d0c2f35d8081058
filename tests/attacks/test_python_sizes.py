"""What Python asks of sizes, of numbers that data give, and of tensors: text, type and copies."""

from __future__ import annotations

import copy
import dataclasses
import enum
import numbers
import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt import Config, optimize

CONFIGS = {"default": Config(), "unchecked": Config(verify="off", tune="off")}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@dataclasses.dataclass
class Shape:
    rows: Any


class Kind(enum.Enum):
    THREE, FOUR = "3", "4"


def of_class(n: Any) -> bool:
    match n:
        case int(k) if k == 4:
            return True
    return False


def asserted(x: Tensor) -> bool:
    torch._assert(x.dim() == 2 and isinstance(x.shape[0], int), f"{x.shape} of {x.shape[0]}")
    torch._assert(isinstance(x.shape[0], int), f"{x.shape[0]}")
    return x.shape[0] > 3


FACTS: dict[str, Callable[[Tensor], Any]] = {
    "f-string": lambda x: f"{x.shape[0]}" == "4",
    "str": lambda x: str(x.shape[0]) == "4",
    "repr": lambda x: repr(x.shape[0]) == "4",
    "percent": lambda x: "%s" % x.shape[0] == "4",  # noqa: UP031
    "digits": lambda x: "%d" % x.shape[0] == "4",  # noqa: UP031
    "format": lambda x: "{}".format(x.shape[0]) == "4",  # noqa: UP032
    "a spec": lambda x: f"{x.shape[0]:03d}" == "004",
    "a shape": lambda x: str(x.shape) == "torch.Size([4, 2])",
    "a tuple": lambda x: str(tuple(x.shape)) == "(4, 2)",
    "joined": lambda x: "x".join(map(str, x.shape)) == "4x2",
    "numel": lambda x: f"{x.numel()}" == "8",
    "half": lambda x: f"{x.shape[0] / 2}" == "2.0",
    "scaled": lambda x: f"{x.shape[0] * 0.5:.2f}" == "2.00",
    "a condition": lambda x: f"{x.shape[0] == 4}" == "True",
    "strides": lambda x: str(x.stride()) == "(2, 1)" and len(str(x.shape[0] + 6)) == 2,
    "key": lambda x: {"4": True}.get(str(x.shape[0]), False),
    "dataclass": lambda x: repr(Shape(x.shape[0])).endswith("=4)"),
    "template": lambda x: string.Template("b$n").substitute(n=x.shape[0]) == "b4",
    "pattern": lambda x: re.match("[4-9]", str(x.shape[0])) is not None,
    "enum": lambda x: x.shape[0] in (3, 4) and Kind(str(x.shape[0])) is Kind.FOUR,
    "error": lambda x: str(ValueError(x.shape[0])) == "4",
    "isinstance": lambda x: isinstance(x.shape[0], int) and x.shape[0] > 3,
    "isinstance of several": lambda x: isinstance(x.shape[0], (str, int)) and x.shape[0] > 3,
    "Integral": lambda x: isinstance(x.shape[0], numbers.Integral) and x.shape[0] > 3,
    "float": lambda x: isinstance(x.shape[0] / 2, float) and x.shape[0] / 2 > 1.9,
    "no float": lambda x: not isinstance(x.shape[0], float) and x.shape[0] == 4,
    "bool": lambda x: isinstance(x.shape[0] > 3, bool) and x.shape[0] > 3,
    "type": lambda x: type(x.shape[0]) is int and x.shape[0] > 3,
    "one of types": lambda x: type(x.shape[0]) in (int, float) and x.shape[0] > 3,
    "class": lambda x: x.shape[0].__class__ is int and x.shape[0] > 3,
    "match": lambda x: of_class(x.shape[0]),
    "is True": lambda x: (x.shape[0] == 4) is True,
    "is not False": lambda x: (x.shape[0] > 3) is not False,
    "found": lambda x: any(flag is True for flag in (x.shape[0] == 4, x.shape[1] == 4)),
    "deepcopy": lambda x: copy.deepcopy({"n": x.shape[0]})["n"] == 4,
    "deepcopy of a shape": lambda x: copy.deepcopy(x.shape)[0] > 3,
    "asdict": lambda x: dataclasses.asdict(Shape(x.shape[0]))["rows"] == 4,
    "copy": lambda x: copy.copy([x.shape[0]])[0] == 4,
    "asserted": asserted,
    "text of data": lambda x: str(x.long().max().item()) == "4",
    "text of a count": lambda x: f"{x.unique().numel()}" == "8",
    "text of a tensor": lambda x: "4." in str(x),
    "text of a scalar": lambda x: f"{x.max()}".startswith("4"),
    "text of a list": lambda x: "4" in str(x.long().tolist()),
}


class Ask(nn.Module):
    def __init__(self, fact: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fact, self.layer = fact, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * 2 if self.fact(x) else self.layer(x).relu()


@each_config
@pytest.mark.parametrize("fact", FACTS.values(), ids=FACTS)
def test_a_fact(fact: Callable[[Tensor], Any], config: Config) -> None:
    model = Ask(fact).eval()
    fast = optimize(model, config=config)
    with torch.no_grad():
        for rows in (3, 4, 5, 0 if "data" not in str(fact) else 1, 4, 3):
            x = torch.arange(2 * rows).view(rows, 2).float() / 2 + 0.5
            try:
                expected = model(x)
            except RuntimeError:
                with pytest.raises(RuntimeError):
                    fast(x)
                continue
            torch.testing.assert_close(fast(x), expected)


def test_the_text_of_a_message_is_no_guard() -> None:
    fast = optimize(Ask(asserted).eval(), (torch.randn(4, 2),), Config(tune="off"))
    for rows in (5, 6, 7):
        with torch.no_grad():
            fast(torch.randn(rows, 2))
    (entry,) = fast._fxopt.entries
    assert entry.executable is not None


class Text(str):
    pass


class Number(int):
    pass


class Keeping(nn.Module):
    """Assigns to `kept`, `later` and `first`, and returns something of another class."""

    def __init__(self, value: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Any:
        self.later = x.shape[0]
        self.first = [x.shape, 1]
        self.kept = self.value(x)
        return x * 2, self.value(x)


VALUES: dict[str, Callable[[Tensor], Any]] = {
    "Size": lambda x: x.shape,
    "part of a Size": lambda x: x.shape[:1],
    "sum of Sizes": lambda x: x.shape + x.shape,
    "in a dict": lambda x: {"a": [x.shape], "b": (x.shape[0],)},
    "str": lambda x: Text("a"),
    "int": lambda x: Number(3),
    "Counter": lambda x: Counter("aab"),
    "text": lambda x: f"b{x.shape[0]}",
    "enum": lambda x: Kind.FOUR,
}


@each_config
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_classes_of_results_and_attributes(value: Callable[[Tensor], Any], config: Config) -> None:
    eager, fast = Keeping(value), optimize(Keeping(value), config=config)
    for rows in (3, 4, 3):
        x = torch.randn(rows, 4)
        expected, found = eager(x), fast(x)
        for a, b in ((expected[1], found[1]), (eager.kept, fast.kept), (eager.first, fast.first)):
            assert a == b and type(a) is type(b) and repr(a) == repr(b)
        assert [name for name in vars(eager) if name in ("kept", "later", "first")] == [
            name for name in vars(fast._fxopt.original) if name in ("kept", "later", "first")
        ]


class Marking(nn.Module):
    def __init__(self, of: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.of = nn.Linear(2, 2), of

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.of(self, x, y).task = "ctr"
        return y


@each_config
@pytest.mark.parametrize("of", [lambda m, x, y: y, lambda m, x, y: x, lambda m, x, y: m.layer.weight])
def test_attributes_of_tensors(of: Callable[[Any, Tensor, Tensor], Tensor], config: Config) -> None:
    model = Marking(of)
    fast = optimize(model, config=config)
    for rows in (3, 4):
        y = fast(x := torch.randn(rows, 2))
        assert of(model, x, y).task == "ctr"
