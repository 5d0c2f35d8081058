"""Models that are one function of ids or floats, and what the pass of dead checks did to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt import Config, optimize
from fxopt.rewrites import PASSES

ALONE = tuple(ran.name for ran in PASSES if ran.name != "dead_checks")
EXTREMES = [-(2**63), 2**63 - 1, -(2**31) - 1, 2**31, 2**32 + 5, -1, 0, 1, 99, 100, 101]
FLOATS = [float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 0.5, -0.5, 1e38, -1e-45, 2.0, -2.0]


class Guarded(nn.Module):
    """f(model, x) with a table of 101 rows, a bag, and 100 edges to bucketize by."""

    def __init__(self, f: Callable[[Guarded, Tensor], object]) -> None:
        super().__init__()
        self.emb = nn.Embedding(101, 8)
        self.bag = nn.EmbeddingBag(101, 8, mode="sum")
        self.edges: Tensor
        self.register_buffer("edges", torch.linspace(-2, 2, 100))
        self.f = f

    def forward(self, x: Tensor) -> object:
        return self.f(self, x)

    def bucket(self, x: Tensor) -> Tensor:
        """Ids in [0, 100]."""
        return torch.bucketize(x, self.edges)


@dataclass
class Done:
    """The optimized model, and the report of the pass."""

    model: Guarded
    fast: nn.Module
    what: list[str]
    why: list[str]
    stays: list[str]

    @property
    def operators(self) -> set[str]:
        """Names of the operators that are left."""
        return _operators(self.fast._fxopt.entries[0].executable.graph)  # type: ignore[union-attr, index]

    @property
    def gone(self) -> set[str]:
        """Names of the operators of which none is left."""
        return _operators(self.fast._fxopt.entries[0].executable.capture.graph) - self.operators  # type: ignore[union-attr, index]


def _operators(module: GraphModule) -> set[str]:
    targets = (node.target for node in module.graph.nodes)
    return {t.overloadpacket.__name__ for t in targets if isinstance(t, torch._ops.OpOverload)}


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random, with the extremes among them."""
    x = torch.randn(*shape)
    flat = x.view(-1)
    flat[: len(FLOATS)] = torch.tensor(FLOATS)[: flat.numel()]
    return x.to(dtype)


def ids(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Random over the whole dtype, its extremes among them."""
    limits = torch.iinfo(dtype)
    x = torch.randint(limits.min, limits.max, shape, dtype=dtype)
    chosen = [limits.min, limits.max, *(n for n in EXTREMES if limits.min <= n <= limits.max)]
    x.view(-1)[: len(chosen)] = torch.tensor(chosen, dtype=dtype)[: x.numel()]
    return x


def run(
    f: Callable[[Guarded, Tensor], object],
    make: Callable[..., Tensor] = floats,
    tail: tuple[int, ...] = (),
    disables: tuple[tuple[str, ...], ...] = ((), ALONE),
) -> Done:
    """Optimize at batch 6, with the other passes and without; both give eager's bits at every batch."""
    model = Guarded(f).eval()
    with torch.no_grad():
        for disable in disables:
            fast = optimize(model, (make(6, *tail),), Config(disable=disable))
            for batch in (0, 1, 2, 40):
                x = make(batch, *tail)
                same_bits(fast(x), model(x))
    (findings,) = fast._fxopt.findings
    assert not findings.eager_reason and len(fast._fxopt.entries) == 1
    (ran,) = (ran for ran in findings.passes if ran.name == "dead_checks")
    assert not ran.rolled_back, ran.rolled_back
    return Done(
        model,
        fast,
        [change.what for change in ran.changes],
        [change.why for change in ran.changes],
        [miss.reason for miss in ran.misses],
    )


def same_bits(found: object, expected: object) -> None:
    if isinstance(expected, (tuple, list)):
        for one, other in zip(found, expected, strict=True):  # type: ignore[call-overload]
            same_bits(one, other)
        return
    assert isinstance(found, Tensor) and isinstance(expected, Tensor)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if found.is_floating_point():
        as_ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
        found, expected = found.contiguous().view(as_ints), expected.contiguous().view(as_ints)
    assert torch.equal(found, expected)
