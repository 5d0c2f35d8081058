"""Random models of one traced and one opaque submodule, a hook, and statements that read and write what all of them
share. `check(seed)` makes any other of them."""

from __future__ import annotations

import linecache
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.attacks.attack import CONFIGS, Attack
from tests.attacks.sizes import ids, rows

OF_CHILD = """self.n += 1|self.n = 5|self.aux = x.detach().mean(0)|self.m = self.m * 0.9 + x.detach().mean(0)
self.m.add_(1)|self.kept["o"] = self.kept["o"] + 1|x = self.l(x)|x = x * self.scale|x = x + self.kept["o"]
x = x + self.m + self.aux|self.l.weight.data.mul_(0.9)|x = torch.tanh(self.l(x))"""
OF_MODEL = """x = torch.relu(self.a(x))|x = self.b(x)|x = self.opaque(x)|x = self.opaque(x)|x = self.traced(x)
x = x + self.table(i).sum(1)|x = torch.cat([self.table(i[:, 0]), x], 1)[:, 2:6]|self.n += 1|self.n = 3|x = x * self.n
self.seen.append(len(x))|self.seen = []|x = x * (len(self.seen) + 1)|self.kept["o"] = x.detach()|x = x + self.kept["o"]
self.m.add_(x.detach().mean(0))|self.m = self.m * 0.9 + x.detach().mean(0)|x = x + self.m|self.aux = x|x = x - self.aux
self.scale = len(x) * 0.5|x = x * self.scale|x = x + self.opaque.aux|x = x + self.opaque.n|x = x + self.opaque.m
x = x * self.opaque.scale + self.opaque.kept["o"]|self.opaque.scale = 2.0|self.opaque.kept["o"] = 1.5|self.opaque.n = 0
self.opaque.aux = x.detach().mean(0)|self.traced.scale = 2.0|self.traced.m = self.traced.m * 0.5|x = x + self.traced.aux
x = x * self.traced.scale + self.traced.m|self.a.weight.data.mul_(0.9)|self.a.weight.data.clamp_(min=0)|d.mul_(2)
self.table.weight.data[0].zero_()|x = x @ self.a.weight|x = x @ self.opaque.l.weight|x = F.dropout(x, 0.5)
x = x * 2; x[:, 1:].add_(1)|x = x + d|x = F.relu6(x * 3)|x = torch.stack([x, x * 2], 1).amax(1)
outs.append(self.m * 1)"""
OF_HOOK = """self.seen.append(1)|self.aux = out|self.kept["o"] = out.detach()|return out * self.scale|self.n += 1
self.m.add_(1)|module.tag = out|self.opaque.aux = out.detach().mean(0)"""
OF_USER = """model.scale += 1|model.n = 7|model.train(not model.training)|model.a.weight.data.mul_(0.5)
model.b = nn.Linear(4, 4)|model.n = 8
model.a.weight.requires_grad_(not model.a.weight.requires_grad)|model.opaque.scale = 0.5|model.opaque.kept["o"] = 9.0
model.opaque.l.weight.data.mul_(2)|model.traced.l = nn.Linear(4, 4)|model.m = torch.full((4,), 2.0)|model.seen.append(5)
model.kept["o"] = torch.zeros(4)|model.b.bias = None|model.opaque.m = torch.ones(4)"""
SOURCE = """class Child(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.scale, self.aux, self.n, self.kept = nn.Linear(4, 4), 1.5, torch.zeros(4), 0, {{"o": 0.5}}
        self.register_buffer("m", torch.zeros(4))
    def forward(self, x):
        {traced}
        return x
class Opaque(Child):
    def forward(self, x):
        if float(x.detach().sum()) > 1e9: return x
        {opaque}
        return x
class Model(Child):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.table, self.seen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(9, 4), []
        self.traced, self.opaque = Child(), Opaque()
        {hooked}
    def hook(self, module, args, out):
        {hook}
    def forward(self, d, i):
        x, outs = d * 1, []
        {forward}
        return [x, *outs]
"""


def check(seed: int) -> None:
    draw = random.Random(seed)

    def some(text: str, least: int, most: int) -> str:
        ways = text.replace("\n", "|").split("|")
        return "\n        ".join(draw.choice(ways) for _ in range(draw.randint(least, most)))

    hooked = f"self.{draw.choice(('a', 'b', 'traced', 'opaque'))}.register_forward_hook(self.hook)"
    source = SOURCE.format(
        traced=some(OF_CHILD, 1, 4), opaque=some(OF_CHILD, 1, 4), hook=some(OF_HOOK, 1, 1),
        forward=some(OF_MODEL, 3, 8), hooked=draw.choice((hooked, "pass")),
    )  # fmt: skip
    name, names = f"mixed{seed}.py", {"torch": torch, "nn": nn, "F": F, "__name__": "mixed"}
    linecache.cache[name] = len(source), None, source.splitlines(True), name
    exec(compile(source, name, "exec"), names)
    change = compile(some(OF_USER, 1, 1), "user", "exec")

    def between(model: nn.Module) -> None:
        torch.manual_seed(seed)
        exec(change, {"torch": torch, "nn": nn, "model": model})

    calls = [lambda n=n, below=below: (rows(n, 4), ids(n, 2, below=below)) for n, below in ((3, 9), (3, 9), (5, 60))]
    attack = Attack(names["Model"], calls, grad=draw.random() < 0.5, between=between)  # type: ignore[arg-type]
    attack.check(CONFIGS["default" if seed % 4 == 0 else "unchecked"])


@pytest.mark.parametrize("seed", range(8, 16))
def test_mixed(seed: int) -> None:
    check(seed)
