"""What facts are, and what a forward decides by them."""

from __future__ import annotations

NUMBERS = (
    "1",
    "2",
    "3",
    "-1",
    "0",
    "2.0",
    "0.5",
    "-1.5",
    "True",
    "False",
    "1.0",
    "0.0",
    "-0.0",
    "np.float32(2)",
    "np.int64(3)",
)
TEXTS = ("'relu'", "'tanh'", "'sigmoid'")
FUNCTIONS = (
    "torch.relu",
    "torch.tanh",
    "double",
    "triple",
    "(lambda t: t - 1)",
    "F.relu",
    "nn.ReLU()",
    "torch.nn.functional.tanh",
    "Act()",
    "Act(5)",
    "functools.partial(torch.mul, other=3)",
)
VALUES = (
    "None",
    "1",
    "'a'",
    "torch.float32",
    "torch.float64",
    "[]",
    "[1]",
    "()",
    "(1, 2)",
    "nn.ReLU",
    "int",
    "float",
    "torch.Size([2])",
    "torch.device('cpu')",
    "Color.RED",
    "Color.BLUE",
    "True",
    "1.0",
)

KINDS = {"number": NUMBERS, "text": TEXTS, "function": FUNCTIONS, "value": VALUES}

USES = {
    "number": (
        "$x * $V",
        "$x + $V",
        "($x * 2 if $V else $x)",
        "($x * 2 if $V > 1 else $x - 1)",
        "$x[:, : max(1, int($V))]",
        "$x.sum(int($V) % 2)",
        "torch.cat([$x] * (1 + abs(int($V))), 1)",
        "[torch.relu, torch.tanh, double][int($V) % 3]($x)",
        "self.layers[int($V) % 2]($x)",
        "getattr(self, 'layer' + str(int($V) % 2))($x)",
        "$x.roll(int($V), 1)",
        "repeated($x, $V)",
        "($x * 2 if isinstance($V, int) else $x)",
        "($x * 2 if $V == 2 else $x)",
        "$x.long() * $V",
        "TABLE[int($V) % 3] * $x",
        "F.dropout($x, 0.0, bool($V)) + $V",
        "$x.clamp(min=float($V))",
        "torch.full((4,), $V) + $x",
        "$x ** abs($V)",
        "($x + 1 if str($V) == '2' else $x)",
        "$x.unflatten(1, (1 + abs(int($V)) % 2, -1))",
        "1 / ($V + $x)",
        "torch.tensor($V) * $x",
    ),
    "text": (
        "getattr(torch, $V)($x)",
        "{'relu': double, 'tanh': triple}.get($V, torch.abs)($x)",
        "$x * len($V)",
        "($x * 2 if $V == 'relu' else $x)",
        "($x * 2 if $V.startswith('t') else $x)",
        "named($x, $V)",
    ),
    "function": (
        "$V($x)",
        "list(map($V, [$x]))[0]",
        "nn.Sequential(*[])($V($x))",
        "($x * 2 if $V is double else $V($x))",
    ),
    "value": (
        "($x * 2 if $V is None else $x)",
        "($x * 2 if $V else $x)",
        "($x * 2 if $V == 1 else $x)",
        "$x * len(str($V))",
        "($x * 2 if isinstance($V, (list, int)) else $x)",
        "($x * 2 if $V in (1, 'a', torch.float32) else $x)",
        "$x * len(type($V).__name__)",
    ),
}

HEAD = """
import collections, dataclasses, functools, operator, types, weakref, enum
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
import $other as other

BASES = []
TABLE = [2.0, 3.0, -1.0]
Color = enum.Enum("Color", "RED BLUE")

class Act:
    def __init__(self, scale=2):
        self.scale = scale

    def __call__(self, x):
        return x * self.scale

def double(x):
    return x * 2

def triple(x):
    return x * 3

def repeated(x, n):
    for _ in range(abs(int(n))):
        x = x * 2 + 1
    return x

def named(x, name):
    match name:
        case "relu":
            return x.relu()
        case "tanh":
            return x * 5
    return x
"""
