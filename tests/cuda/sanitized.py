"""Calls of a shim library built with sanitizers: `python -m tests.cuda.sanitized LIBRARY`, with ASan preloaded.

Every tensor is memory of its own, so that a load or store beside it is seen, also one that __ldg did not make.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from fxopt.kernels.columns.encode import encode
from tests.cuda.compare import assert_same, random_call
from tests.cuda.shim_library import Shim
from tests.cuda.test_columns_shim import one_column
from tests.cuda.test_long_bags_shim import CASES
from tests.cuda.test_planted_shim import bucketized
from tests.cuda.test_short_bags_shim import short, with_long_ones
from tests.cuda.test_tiles_shim import narrow


def main(library: str) -> None:
    shim = Shim(Path(library))
    for seed, rows in enumerate((1, 3, 21)):
        call = random_call(seed, rows, 6, ("lookup", "dense_pool", "bag", "copy", "masked"))
        assert_same(call, shim.run(call.tensors, call.tables, call.plan, seed)[0])
    for make in (bucketized, *CASES.values(), short, with_long_ones, narrow):
        tensors, tables, plan = make()
        assert shim.run(tensors, tables, plan)[0].isfinite().all()
    tensors, tables, plan = one_column(torch.randint(0, 7, (45,)))
    shim.backward([torch.randn(45, 8)], tensors, tables, encode(plan))
    tensors, tables, plan = one_column(torch.tensor([1, 10**6, -1]))
    assert shim.run(tensors, tables, plan)[0].isnan().all(1).tolist() == [False, True, True]
    assert shim.failure() != ""


if __name__ == "__main__":
    main(sys.argv[1])
