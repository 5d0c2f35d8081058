"""Linear layers for a few rows, blocks that wait for each other, through the shim."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxopt.kernels.mlp.cuda.few_rows import KERNEL, MOST_ROWS, gpu_few_rows, reference
from tests.cuda.planted import awake, compiled, on_the_shim
from tests.cuda.programs import layers
from tests.cuda.shim_library import ShimError

# What is wrong, where, and what the source says instead where shim::planted is the bug's number.
MUTATIONS = {
    "no barrier between layers": ("grid_barrier();", "if (!{}) grid_barrier();"),
    "a barrier that not every block reaches": (
        "if (at + 1 < request.layers)",
        "if (at + 1 < request.layers && !({} && int(blockIdx.x) * layer.outputs >= layer.n))",
    ),
    "weights read too soon": (
        "cuda::wait_copies<kStages - 1>();",
        "if (!{}) cuda::wait_copies<kStages - 1>();",
    ),
    "weights given up too soon": ("    weights.wait();\n", "    weights.wait();\n    if ({}) weights.fetch();\n"),
    "results of one layer over those of another": ("(at & 1)", "({} ? 0 : at & 1)"),
    "sums of warps read too soon": (
        "  __syncthreads();\n  if (gives)",
        "  if (!{}) __syncthreads();\n  if (gives)",
    ),
    "no mask of the last outputs": ("&& first + o < l.n) cuda", "&& ({} || first + o < l.n)) cuda"),
    "no mask of the last inputs": ("if (k < l.k && o <", "if (({} || k < l.k) && o <"),
    "results of rows that are none": ("&& row_mine < rows;", "&& ({} || row_mine < rows);"),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """With every planted bug, asleep."""
    return compiled(KERNEL, tmp_path_factory.mktemp("few_rows"), MUTATIONS, "mlp/cuda/few_rows.cu")


class Guarded:
    """Memory as an allocator gives it: NaN, with more of it behind that nobody may touch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, readable: list[Tensor]) -> None:
        self.memory: list[tuple[Tensor, int]] = []
        self.readable = readable
        monkeypatch.setattr(Tensor, "new_empty", lambda _, *sizes: self.new_empty(*sizes))

    def new_empty(self, *sizes: int) -> Tensor:
        size = torch.Size(sizes).numel()
        whole = torch.full((size + 4096,), float("nan"))
        self.memory.append((whole, size))
        self.readable.append(whole[:size])
        return whole[:size].view(sizes)

    def untouched(self) -> bool:
        return all(bool(whole[size:].isnan().all()) for whole, size in self.memory)


def check(library, monkeypatch, rows, sizes, bias=True, seed=0):
    weights, biases, codes = layers(sizes, bias)
    x = torch.randn(rows, sizes[0])
    readable = [x, *weights, *(b for b in biases if b is not None)]
    with monkeypatch.context() as patched:
        on_the_shim(patched, library, readable, seed)
        guarded = Guarded(patched, readable)
        found = gpu_few_rows(x, weights, biases, codes)
    assert len(guarded.memory) == 2, "expected the kernel to serve"
    exact = reference(
        x.double(), [w.double() for w in weights], [None if b is None else b.double() for b in biases], codes
    )
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    assert guarded.untouched()


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, MOST_ROWS])
def test_every_number_of_rows(library, monkeypatch, rows):
    check(library, monkeypatch, rows, (72, 36, 20, 1), seed=rows)


@pytest.mark.parametrize(
    "sizes",
    [(1028, 4), (4, 4, 4, 4, 4), (4100, 28, 8), (8, 60, 1), (2052, 1)],
    ids=lambda sizes: "-".join(map(str, sizes)),
)
def test_every_width(library, monkeypatch, sizes):
    check(library, monkeypatch, 2, sizes, bias=sizes[0] % 8 != 0)


@pytest.mark.parametrize("name", MUTATIONS)
def test_planted_bugs_are_caught(library, monkeypatch, name):
    with awake(library, MUTATIONS, name):
        for seed in range(3):
            try:
                check(library, monkeypatch, 3, (2056, 52, 52, 4, 36, 1), seed=seed)
            except (AssertionError, ShimError):
                return
    pytest.fail("nobody noticed")
