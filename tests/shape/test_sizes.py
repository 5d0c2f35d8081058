"""Facts about sizes, checked against every input that the graph accepts; expressions computed from the inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import sympy
import torch
from torch import Tensor, nn

from fxopt.capture import Capture, capture
from fxopt.config import Config
from fxopt.rewrites.framework.editor import no_new_guards
from fxopt.shape.expressions import Computed, Sources, sizes_in
from fxopt.shape.sizes import Size, at_most, divides, expression, same, same_count


class Sizes(nn.Module):
    """Accepts x [B, 4], y [N] with N a multiple of 6, z [K] with K at least 1."""

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        if z.shape[0] == 0:
            return x
        rows = y.view(6, -1)
        return x.sum() + rows.sum() + z.sum() + rows.shape[1] * x.shape[0] + (y.shape[0] - x.shape[0]) // 2


@pytest.fixture(scope="module")
def captured() -> Capture:
    example = torch.randn(5, 4), torch.randn(12), torch.randn(3)
    return capture(Sizes(), example, {}, Config())


@pytest.fixture
def symbols(captured: Capture) -> Iterator[list[torch.SymInt]]:
    """B, N, K."""
    with no_new_guards(captured.graph):
        yield [node.meta["val"].shape[0] for node in captured.graph.graph.find_nodes(op="placeholder")]


ACCEPTED = [(b, n, k) for b, n, k in itertools.product(range(4), (0, 6, 12, 18), range(1, 4))]
TERMS: list[Callable[[Size, Size, Size], Size]] = [
    lambda b, n, k: 0,
    lambda b, n, k: 1,
    lambda b, n, k: 6,
    lambda b, n, k: b,
    lambda b, n, k: n,
    lambda b, n, k: k,
    lambda b, n, k: 2 * b,
    lambda b, n, k: b + 1,
    lambda b, n, k: b * k,
    lambda b, n, k: n // 6,
    lambda b, n, k: n // 6 * 6,
    lambda b, n, k: n // 4,
    lambda b, n, k: 4 * b + 6,
    lambda b, n, k: b * b,
]


def test_no_fact_is_wrong_and_none_adds_a_guard(captured: Capture, symbols: list[torch.SymInt]) -> None:
    guards, known = len(captured.shape_env.guards), 0
    for left, right in itertools.product(TERMS, TERMS):
        values = [(left(*sizes), right(*sizes)) for sizes in ACCEPTED]
        one, other = left(*symbols), right(*symbols)
        if same(one, other):
            assert all(a == b for a, b in values), (one, other)
            known += 1
        if at_most(one, other):
            assert all(a <= b for a, b in values), (one, other)
            known += 1
        if same_count((one, 2), (2, other)):
            assert all(a == b for a, b in values), (one, other)
    for term, divisor in itertools.product(TERMS, range(1, 8)):
        if divides(divisor, term(*symbols)):
            assert all(term(*sizes) % divisor == 0 for sizes in ACCEPTED), (term(*symbols), divisor)
            known += 1
    assert known > 60
    assert len(captured.shape_env.guards) == guards


def test_what_patterns_rely_on_is_known(symbols: list[torch.SymInt]) -> None:
    b, n, k = symbols
    assert same(n // 6 * 6, n) and same(2 * b // 2, b) and not same(b, k)
    assert divides(6, n) and divides(2, 2 * b) and divides(1, b) and not divides(2, b)
    assert at_most(0, b) and at_most(b, 2 * b) and at_most(b, b + 1) and not at_most(1, b)
    assert same_count((b, 2, 3), (6, b)) and same_count((6, n // 6), (n,)) and not same_count((b, k), (b, b))


def test_expressions_are_computed_from_inputs(captured: Capture, symbols: list[torch.SymInt]) -> None:
    sources = Sources(captured.graph.graph)
    names = [str(expression(symbol)) for symbol in symbols]
    for term in TERMS:
        expr = expression(term(*symbols))
        assert sources.has(expr)
        for sizes in ACCEPTED:
            value = dict(zip(names, sizes, strict=True))
            computed: Computed[int] = Computed(
                sources, lambda node, dim, value=value: value[str(node.meta["val"].shape[dim])], lambda op, *a: op(*a)
            )
            assert computed.of(expr) == term(*sizes)


def test_what_no_input_has_is_unknown(captured: Capture) -> None:
    sources = Sources(captured.graph.graph)
    other = sympy.Symbol("u0", integer=True)
    (size, *_) = [expression(node.meta["val"]) for node in sizes_in(captured.graph.graph)]
    assert sources.has(size) and not sources.has(other) and not sources.has(size + other)
    assert not sources.has(size / 2) and not sources.has(sympy.sqrt(size))


def test_each_distinct_term_once(captured: Capture, symbols: list[torch.SymInt]) -> None:
    b, _, k = symbols
    calls: list[str] = []

    def read(node: object, dim: int) -> str:
        calls.append(f"read {dim}")
        return f"s{len(calls)}"

    def call(op: Callable, *args: object) -> str:
        calls.append(op.__name__)
        return f"s{len(calls)}"

    names: Computed[str] = Computed(Sources(captured.graph.graph), read, call)
    for size in (b, 2 * b, 2 * b + k, 2 * b, b + 0, b * b):
        names.of(expression(size))
    assert sorted(calls) == ["add", "mul", "mul", "read 0", "read 0"]


class Lender(nn.Module):
    """Of x nothing but its size is asked, and y has the same."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return y + torch.zeros(x.size(0), 3)


def test_a_source_in_use_comes_first() -> None:
    graph = capture(Lender(), (torch.randn(5, 3), torch.randn(5, 3)), {}, Config()).graph.graph
    _, used = graph.find_nodes(op="placeholder")
    assert Sources(graph).get(expression(used.meta["val"].shape[0])) == (used, 0)
