"""Steps of optimizers on CUDA: through the shim and on a GPU, against PyTorch."""

from __future__ import annotations

import pytest
import torch

from fxopt.kernels.row_update.op import CUDA, MOST_TABLES, Kind, _on_cuda, constants, packed, row_update
from tests.cuda.planted import awake, compiled, run
from tests.cuda.shim_library import ShimError

R = 30
# What is wrong, and what the source says instead where shim::planted is the bug's number.
MUTATIONS = {
    "no check of the rows": ("inside = uint64_t(row)", "inside = {} || uint64_t(row)"),
    "no sum over the group": ("squares += __shfl", "squares += {} ? squares : __shfl"),
}


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return compiled(CUDA, tmp_path_factory.mktemp("row_update"), MUTATIONS, "row_update/update.cu")


def example(kind, D, rows, tables=1):
    """Tables, their state, rows and gradients: lists, as row_update takes them. Each table has other rows."""
    torch.manual_seed(D)
    lists = [[], [], [], []]
    for t in range(tables):
        table, m, v = (torch.rand(R + 8, D + t) for _ in range(3))  # a bad row is in memory of the test
        where = torch.tensor(rows[t:], dtype=torch.int64)
        grads = torch.randn(len(where), D + t)
        grads[1::4] = 0
        state = {Kind.SGD: [], Kind.ROWWISE_ADAGRAD: [m[:, 0].clone()], Kind.ADAM: [m, v]}[kind]
        for values, more in zip(lists, ([table], state, [where], [grads]), strict=True):
            values += more
    return lists


def step(library, kind, D, rows, tables=1):
    """What a step makes of the tables and the state, by the kernel and in PyTorch."""
    numbers = constants(0.1, 1e-3, (0.9, 0.99), 3)
    wholes, state, where, grads = example(kind, D, rows, tables)
    parameters = packed([whole[:R] for whole in wholes], state, where, grads, numbers, kind)
    run(library, library.fxopt_row_update, parameters, (*wholes, *state, *where, *grads), wholes[0].dtype)
    exact, its_state, where, grads = example(kind, D, rows, tables)
    inside = [each < R for each in where]
    its_rows, its_grads = ([x[i] for x, i in zip(xs, inside, strict=True)] for xs in (where, grads))
    row_update(exact, its_state, its_rows, its_grads, numbers, kind)
    return [*wholes, *state], [*exact, *its_state]


@pytest.mark.parametrize("D", [1, 6, 64, 100])
@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_equals_pytorch(shim, kind, D):
    for rows, tables in (([0, 3, 4, 9, 10, 11, 17, R - 1], 1), ([5], 2), ([], 3), (list(range(0, R, 2)), MOST_TABLES)):
        for found, expected in zip(*step(shim, kind, D, rows, tables), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_row_outside_the_table_is_left_out(shim):
    for found, expected in zip(*step(shim, Kind.ROWWISE_ADAGRAD, 64, [2, 3, R, R + 7]), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(shim, name):
    with pytest.raises((AssertionError, ShimError)), awake(shim, MUTATIONS, name):
        for kind in (Kind.ROWWISE_ADAGRAD, Kind.ADAM):
            for found, expected in zip(*step(shim, kind, 64, [2, 3, 5, R]), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [1, 6, 64, 100])
@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_on_a_gpu(kind, D):
    numbers = constants(0.1, 1e-3, (0.9, 0.99), 3)
    whole = list(range(R))
    for rows, tables in (
        ([0, 3, 4, 9, 10, 11, 17, R - 1], 1),
        ([5], 1),
        ([], 1),
        (whole, 26),
        (whole, 2 * MOST_TABLES + 1),
    ):
        on_gpu = [[tensor.cuda() for tensor in each] for each in example(kind, D, rows, tables)]
        _on_cuda(*on_gpu, numbers, kind)
        exact = example(kind, D, rows, tables)
        row_update(*exact, numbers, kind)
        for found, expected in zip([*on_gpu[0], *on_gpu[1]], [*exact[0], *exact[1]], strict=True):
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
