"""Products and dots of field pairs on CUDA: which are found, and which stay. The kernel: test_pair_products_shim.py."""

from __future__ import annotations

import itertools

import pytest
import torch

from fxopt.kernels.interactions.cuda.pair_products import gpu_pairs
from fxopt.normalize import normalize
from fxopt.rewrites import field_index, pair_products
from tests.cuda.on_a_gpu import names_of, rewritten
from tests.cuda.pretended import constants_on_cuda, traced

PAIRS = [list(each) for each in zip(*itertools.combinations(range(5), 2), strict=True)]


def selected(z, i, j):
    return z.index_select(1, i) * z.index_select(-2, j)


def indexed(z, i, j):
    return (z[:, i] * z[:, j]).sum(dim=2)


def kept_dim(z, i, j):
    return (z.index_select(1, i) * z[:, j]).sum(-1, keepdim=True).relu()


def squares(z, i, j):
    rows = z[:, i]
    return (rows * rows).sum(2)


def read_twice(z, i, j):
    """The product stays one, and the sum is computed beside it."""
    product = z[:, i] * z[:, j]
    return product.sum(2), product.exp()


def edited_between(z, i, j):
    """The sum is not that of the product any more."""
    product = z[:, i] * z[:, j]
    y = product.exp()
    product.mul_(2)
    return product.sum(2), y


def summed_again(z, i, j):
    return (z[:, i] * z[:, j]).sum(2).sum(1)


def of_a_slice(z, i, j):
    return selected(z[:, 1:, :4], i, j[:1].expand(10))


@pytest.mark.parametrize(
    ("function", "dots"),
    [
        *((selected, [False]), (indexed, [True]), (kept_dim, [True]), (squares, [True]), (of_a_slice, [False])),
        *((read_twice, [False, True]), (edited_between, [False]), (summed_again, [True])),
    ],
)
def test_what_is_found_gives_eagers_numbers(function, dots):
    inputs = [torch.randn(7, 6, 5), *map(torch.tensor, PAIRS)]
    module = traced(function, inputs)
    (ran,) = rewritten(module, pair_products.REWRITE)
    assert len(ran.changes) == len(dots) and not ran.rolled_back and not ran.misses
    calls = module.graph.find_nodes(op="call_function", target=torch.ops.fxopt.gpu_pairs.default)
    assert [call.args[3] for call in calls] == dots and all(call.meta["bound"] is gpu_pairs for call in calls)
    assert not {"aten.index_select", "aten.index.Tensor", "aten.mul.Tensor"} & {*names_of(module)}
    torch.testing.assert_close(module(*inputs), function(*inputs))


def listed(z, layer):
    left, right = PAIRS
    return torch.mm((z[:, left] * z[:, right]).sum(2), layer)


def listed_product(z, layer):
    left, right = PAIRS
    return z[:, left] * z[:, right]


@pytest.mark.parametrize("function", [listed, listed_product])
def test_constant_lists_of_fields_in_either_form(function):
    for z in (torch.randn(4, 5, 8), torch.randn(8, 5, 4).permute(2, 1, 0)):
        inputs = z, torch.randn(10, 3)
        module = traced(function, inputs)
        normalize(module, True)
        with constants_on_cuda():
            fields, ran = rewritten(module, field_index.REWRITE, pair_products.REWRITE)
        seen = function is listed_product and not z.is_contiguous()  # the strides leave the graph
        assert len(fields.changes) == 2 and bool(ran.changes) is not seen and not ran.rolled_back
        assert torch.equal(module(*inputs), function(*inputs))


def test_what_stays():
    def other_tensors(z, i, j):
        return z.index_select(1, i) * (z + 1).index_select(1, j)

    def read_elsewhere(z, i, j):
        left = z.index_select(1, i)
        return left * z.index_select(1, j), left.exp()

    def edited(z, i, j):
        product = selected(z, i, j)
        z.zero_()
        return product

    def of_samples(z, i, j):
        return z.index_select(0, i) * z.index_select(0, j)

    def one_for_all(z, i, j):
        return z.index_select(1, i) * z.index_select(1, j[:1])

    def too_wide(z, i, j):
        return selected(z.repeat(1, 1, 60), i, j)

    inputs = [torch.randn(7, 6, 5), *map(torch.tensor, PAIRS)]
    for function in (other_tensors, read_elsewhere, edited, of_samples, one_for_all, too_wide):
        (ran,) = rewritten(traced(function, inputs), pair_products.REWRITE)
        assert not ran.changes and not ran.rolled_back, function
    narrow = [inputs[0], *(each.int() for each in inputs[1:])]
    for given in ([inputs[0].double(), *inputs[1:]], [inputs[0].half(), *inputs[1:]], narrow):
        (ran,) = rewritten(traced(selected, given), pair_products.REWRITE)
        assert not ran.changes
    (ran,) = rewritten(traced(selected, inputs), pair_products.REWRITE, inference=False)
    assert not ran.changes


def test_sums_over_other_dims_stay_behind_the_product():
    def summed(z, i, j):
        return selected(z, i, j).sum(1), selected(z, j, i).sum((1, 2))

    inputs = [torch.randn(7, 6, 5), *map(torch.tensor, PAIRS)]
    module = traced(summed, inputs)
    (ran,) = rewritten(module, pair_products.REWRITE)
    assert len(ran.changes) == 2 and names_of(module).count("aten.sum.dim_IntList") == 2
    torch.testing.assert_close(module(*inputs), summed(*inputs))
