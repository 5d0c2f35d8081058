"""State that an opaque submodule and the code around it share, but as arguments and results."""

from __future__ import annotations

import types

import torch
from torch import nn

from tests.attacks.attack import Attack
from tests.attacks.sizes import rows

TALLY = {"calls": 0}


class Gate(nn.Module):
    """Stays opaque, since it asks for a value."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.calls, self.scale, self.aux = 0, 1.0, None
        self.config = {"offset": 0.5}
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if float(x.detach().sum()) > 1e9:
            return x
        self.calls += 1
        self.aux = x.mean(0)
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        TALLY["calls"] += 1
        return self.l(x) * self.scale + self.config["offset"]


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.l = Gate(), nn.Linear(4, 4)


class ReadsAux(Gated):
    def forward(self, x):
        return self.gate(self.l(x)) + self.gate.aux


class ReadsReplacedBuffer(Gated):
    def forward(self, x):
        before = self.gate.mean * 1
        return self.gate(self.l(x)), before, self.gate.mean * 2


class ReadsGlobal(Gated):
    def forward(self, x):
        return self.gate(self.l(x)) * TALLY["calls"]


class SetsScale(Gated):
    def forward(self, x):
        self.gate.scale = x.mean()
        return self.gate(self.l(x))


class SetsAndPutsBack(Gated):
    """In the end nothing has changed."""

    def forward(self, x):
        self.gate.config["offset"] = 3.0
        y = self.gate(self.l(x))
        self.gate.config["offset"] = 0.5
        return y


class ResetsCalls(Gated):
    def forward(self, x):
        y = self.gate(self.l(x))
        self.gate.calls = 0
        return y


class HyperNetwork(nn.Module):
    """A layer whose weight is an attribute that each call assigns and reads."""

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(4, 4)
        weight = self.l._parameters.pop("weight")
        self.l.raw, self.l.weight = weight, weight.detach()

    def forward(self, x):
        before = self.l(x).detach()
        self.l.weight = torch.tanh(self.l.raw)
        return before + self.l(x)


class FillsArgument(nn.Module):
    class Inner(nn.Module):
        def forward(self, x, found):
            found["half"] = x / 2
            return x * 2 if float(x.detach().sum()) < 1e9 else x

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        found = {"half": x}
        return self.inner(x, found) * found["half"]


class SharedContext(nn.Module):
    class Reader(nn.Module):
        def __init__(self, context):
            super().__init__()
            self.context = context

        def forward(self, x):
            return x + self.context.hidden if float(x.detach().sum()) < 1e9 else x

    def __init__(self):
        super().__init__()
        self.known = types.SimpleNamespace(hidden=torch.zeros(4))
        self.reader = self.Reader(self.known)

    def forward(self, x):
        self.known.hidden = x.mean(0)
        return self.reader(x)


class Hooked(nn.Module):
    """A hook keeps what a layer returns."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept: list = []
        self.first.register_forward_hook(self.keep)

    def keep(self, module, args, result):
        self.kept.append(result)

    def forward(self, x):
        self.kept = []
        return self.second(torch.relu(self.first(x))) + sum(self.kept)


class HookedAndCleared(Hooked):
    def forward(self, x):
        y = self.second(torch.relu(self.first(x))) + sum(self.kept)
        self.kept.clear()
        return y


class HookReadsParent(Hooked):
    def __init__(self):
        super().__init__()
        self.scale = 1.0
        self.second.register_forward_pre_hook(lambda module, args: (args[0] * self.scale,))

    def keep(self, module, args, result):
        return result * self.scale

    def forward(self, x):
        self.scale = 2.0
        y = self.first(x)
        self.scale = 3.0
        return self.second(y)


class SetByUser(Gated):
    def forward(self, x):
        return self.gate(self.l(x)) * self.gate.config["offset"]


def change(model: nn.Module) -> None:
    model.gate.config["offset"] += 1


def counted(n: int) -> tuple:
    TALLY["calls"] = n  # both models count there
    return (rows(n, 4),)


def thrice(model, **options) -> Attack:
    return Attack(model, [lambda n=n: (rows(n, 4),) for n in (3, 3, 5)], **options)


BOUNDARIES = {
    "reads_aux": thrice(ReadsAux, grad=True),
    "reads_replaced_buffer": thrice(ReadsReplacedBuffer),
    "reads_global": Attack(ReadsGlobal, [lambda n=n: counted(n) for n in (3, 3, 5)]),
    "sets_scale": thrice(SetsScale),
    "sets_and_puts_back": thrice(SetsAndPutsBack),
    "resets_calls": thrice(ResetsCalls),
    "hyper_network": thrice(HyperNetwork, grad=True),
    "fills_argument": thrice(FillsArgument),
    "shared_context": thrice(SharedContext),
    "hooked": thrice(Hooked, grad=True),
    "hooked_and_cleared": thrice(HookedAndCleared),
    "hook_reads_parent": thrice(HookReadsParent),
    "set_by_user": thrice(SetByUser, between=change),
}
