"""Pooled bags from one large table: F.embedding_bag, fbgemm_gpu's table-batched operator on CPU, and fxopt.

One table of 1M x 64 fp32, bags of 0 to 100 ids. Inputs rotate through 16,384 bags, so that rows come from memory.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional

from bench import options
from bench.cells import Cell, run_cell, table
from bench.machine import Neighbours
from bench.peers import Ready, Skipped, with_fxopt
from bench.verify import Judge

ROWS, DIM, LARGEST_BAG = 1_000_000, 64, 100
BAGS = 16_384  # about 820,000 lookups, 140 MB of distinct rows
FEWEST_INPUTS = 2
CAPTURED_AT = 64


class OneBag(nn.Module):
    """forward(values int64 [N], offsets int64 [B + 1]) -> [B, D]"""

    def __init__(self, rows: int = ROWS, dim: int = DIM, mode: str = "sum") -> None:
        super().__init__()
        self.mode = mode
        self.table = nn.EmbeddingBag(rows, dim, mode=mode, include_last_offset=True)
        self.eval()

    def forward(self, values: Tensor, offsets: Tensor) -> Tensor:
        return self.table(values, offsets)


def make_inputs(batch: int, rows: int = ROWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed * 7919 + batch)
    lengths = torch.randint(0, LARGEST_BAG + 1, (batch,), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.randint(0, rows, (int(offsets[-1]),), generator=g), offsets


def with_torch(model: OneBag) -> Ready:
    weight, mode = model.table.weight.detach(), model.mode
    return Ready(lambda v, o: functional.embedding_bag(v, weight, o, mode=mode, include_last_offset=True), 0.0)


def with_operator(model: OneBag) -> Ready | Skipped:
    """fxopt's columns operator alone, on a plan of one column."""
    try:
        from fxopt.kernels.columns.encode import encode
        from fxopt.kernels.columns.op import columns
        from fxopt.kernels.columns.plan import Column, Offsets, Plan, Source
    except ImportError as error:
        return Skipped(f"fxopt.kernels.columns cannot be imported: {error}")
    bag = Offsets(tensor=1, include_last=True)
    column = Column(Source(tensor=0), table=0, output=0, offset=0, pool=model.mode, bag=bag)
    weight = model.table.weight.detach()
    plan = encode(Plan((column,), widths=(weight.shape[1],), dtypes=("float32",)))
    return Ready(lambda v, o: columns((v, o), (weight,), plan)[0], 0.0)


def with_fbgemm(model: OneBag) -> dict[str, Ready | Skipped]:
    """The inference operator of FBGEMM's table-batched embedding with fp32 rows, which is its fastest on CPU:
    its module takes 23 us at batch 1, SplitTableBatchedEmbeddingBagsCodegen 44; at batch 4096 they are equal.

    As its module is called, and the operator alone.
    """
    try:
        tbe, call = _table_batched(model)
    except ImportError as error:
        return {"TBE": Skipped(f"fbgemm_gpu cannot be imported: {error}")}
    return {"TBE": Ready(tbe, 0.0), "TBE operator": Ready(call, 0.0)}


def _table_batched(model: OneBag) -> tuple[nn.Module, Callable[..., Any]]:
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen

    rows, dim = model.table.weight.shape
    tbe = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("table", rows, dim, SparseType.FP32, EmbeddingLocation.HOST)],
        pooling_mode=PoolingMode.MEAN if model.mode == "mean" else PoolingMode.SUM,
        device="cpu",
        output_dtype=SparseType.FP32,
    )
    tbe.fill_random_weights()
    tbe.split_embedding_weights()[0][0].view(torch.float32)[:, :dim].copy_(model.table.weight.detach())
    operator = functools.partial(
        torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function.default,
        tbe.weights_host,
        tbe.weights_uvm,
        tbe.weights_placements,
        tbe.weights_offsets,
        tbe.weights_tys,
        tbe.D_offsets,
        tbe.total_D,
        tbe.max_int2_D,
        tbe.max_int4_D,
        tbe.max_int8_D,
        tbe.max_float16_D,
        tbe.max_float32_D,
    )
    pooling, output, alignment = int(tbe.pooling_mode), tbe.output_dtype, tbe.row_alignment

    def call(values: Tensor, offsets: Tensor) -> Tensor:
        return operator(values, offsets, pooling, None, output, row_alignment=alignment)

    return tbe, call


def run(console: Console, batches: tuple[int, ...], mode: str, seconds: float) -> list[Cell]:
    model = OneBag(mode=mode)
    found: dict[str, Ready | Skipped]
    found = {"F.embedding_bag": with_torch(model), "nn.EmbeddingBag": Ready(model, 0.0), **with_fbgemm(model)}
    found |= {"fxopt": with_fxopt(model, make_inputs(CAPTURED_AT)), "fxopt operator": with_operator(model)}
    for name, it in found.items():
        if isinstance(it, Skipped):
            console.print(f"{name} left out: {it.reason}")
    calls = {name: it.call for name, it in found.items() if isinstance(it, Ready)}
    judge, cells = Judge(model), []
    for batch in batches:
        inputs = [make_inputs(batch, seed=seed) for seed in range(max(FEWEST_INPUTS, BAGS // batch))]
        with console.status(f"batch {batch}"):
            expected = [judge.expect(args) for args in inputs]
            cells.append(run_cell((str(batch),), calls, inputs, expected, seconds))
    return cells


def title(mode: str) -> str:
    return f"one table of {ROWS:,} x {DIM}, {mode} of 0-{LARGEST_BAG} ids a bag"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = options.parser("bags", __doc__, batches=(1, 16, 64, 256, 1024, 4096), seconds=3.0)
    parser.add_argument("--mode", choices=("sum", "mean"), default="sum")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse(argv)
    console, neighbours = options.begin(args), Neighbours()
    cells = run(console, args.batches, args.mode, args.seconds)
    return options.finish(args, console, "bags", [table(title(args.mode), ("batch",), cells)], cells, neighbours)
