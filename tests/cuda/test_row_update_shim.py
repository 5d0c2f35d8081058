"""Steps of optimizers on CUDA: through the shim and on a GPU, against PyTorch."""

from __future__ import annotations

import pytest
import torch

from fxopt.kernels.row_update.op import CUDA, Kind, _on_cuda, constants, packed, row_update
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


def example(kind, D, rows):
    torch.manual_seed(D)
    table, m, v = (torch.rand(R + 8, D) for _ in range(3))  # a bad row is in memory of the test
    grads = torch.randn(len(rows), D)
    grads[1::4] = 0
    state = {Kind.SGD: [], Kind.ROWWISE_ADAGRAD: [m[:, 0].clone()], Kind.ADAM: [m, v]}[kind]
    return table, *state, torch.tensor(rows, dtype=torch.int64), grads


def step(library, kind, D, rows):
    """What a step makes of the table and the state, by the kernel and in PyTorch."""
    numbers = constants(0.1, 1e-3, (0.9, 0.99), 3)
    whole, *state, where, grads = example(kind, D, rows)
    table = whole[:R]
    parameters = packed(table, state, where, grads, numbers, kind)
    run(library, library.fxopt_row_update, parameters, (table, *state, where, grads), table.dtype)
    exact, *its_state, where, grads = example(kind, D, rows)
    inside = where < R
    row_update(exact, its_state, where[inside], grads[inside], numbers, kind)
    return [whole, *state], [exact, *its_state]


@pytest.mark.parametrize("D", [1, 6, 64, 100])
@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_equals_pytorch(shim, kind, D):
    for rows in ([0, 3, 4, 9, 10, 11, 17, R - 1], [5], []):
        for found, expected in zip(*step(shim, kind, D, rows), strict=True):
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
    for rows in ([0, 3, 4, 9, 10, 11, 17, R - 1], [5], [], list(range(R))):
        table, *state, where, grads = (tensor.cuda() for tensor in example(kind, D, rows))
        _on_cuda(table, state, where, grads, numbers, kind)
        exact, *its_state, where, grads = example(kind, D, rows)
        row_update(exact, its_state, where, grads, numbers, kind)
        for found, expected in zip([table, *state], [exact, *its_state], strict=True):
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
