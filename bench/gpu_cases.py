"""What is timed on a GPU: modules with their inputs, and the fewest bytes and operations they need."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from bench.gpu_ids import make_ids
from bench.models import E, ManyColumns, make_inputs

SECTOR = 32  # bytes that DRAM moves at least
BATCHES = (1, 256, 2048)


@dataclass(frozen=True)
class Case:
    """bytes_read counts every row looked up, also one that a cache holds from an earlier lookup: hot ids can beat the
    floor. compile_seconds: to leave torch.compile, by default and with max-autotune. An H200's 16 cores took 2 to 5 by
    default, and 51 for DLRM with max-autotune; the rest is a guess. Infinite: it is not asked."""

    name: str
    batch: int
    module: nn.Module
    inputs: tuple[Any, ...]
    bytes_read: float
    bytes_written: float
    flops: float = 0.0
    dtype: torch.dtype = torch.float32  # of the matrix products
    compile_seconds: tuple[float, float] = (math.inf, math.inf)


def cases(columns: int = 1000, batches: tuple[int, ...] = BATCHES) -> Iterator[Case]:
    """Of the largest model torch.compile is asked for one row, when there is time."""
    from bench.gpu_dense import dense_cases

    for case in model_e(columns, batches):
        asked = case.name.endswith("whole") and case.batch == 256
        yield replace(case, compile_seconds=(240.0, math.inf)) if asked else case
    for ids in ("uniform", "zipf", "one item", "high hot", "medium hot", "low hot"):
        yield micro24(torch.float32, ids)
    for ids in ("uniform", "zipf"):
        yield micro24(torch.bfloat16, ids)
    for batch in (1, 8):
        yield long_bags(batch)
    yield dlrm(2048, torch.bfloat16)
    yield from dense_cases()
    yield from model_e(100, (256,), (10.0, 90.0))


def to_gpu(x: Any) -> Any:
    return tree_map(lambda t: t.cuda(), x)


def whole(
    name: str,
    batch: int,
    module: nn.Module,
    inputs: tuple[Any, ...],
    rows_read: float,
    compile_seconds: tuple[float, float] = (math.inf, math.inf),
) -> Case:
    """A model with a dense side, its bytes and operations counted; rows_read: bytes of its embedding rows."""
    with FlopCounterMode(display=False) as counter:
        outputs = tree_leaves(module(*inputs))
    tables = [m.weight for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    weights = sum(p.nbytes for p in module.parameters()) - sum(w.nbytes for w in tables)
    read = sum(t.nbytes for t in tree_leaves(inputs)) + rows_read + weights
    written, flops = float(sum(t.nbytes for t in outputs)), float(counter.get_total_flops())
    return Case(name, batch, module, inputs, read, written, flops, outputs[0].dtype, compile_seconds)


def model_e(
    columns: int, batches: tuple[int, ...], compile_seconds: tuple[float, float] = (math.inf, math.inf)
) -> Iterator[Case]:
    """RECom's model E, up to the concat and whole. Boundaries and small tables are read once."""
    model = ManyColumns(E.scaled(columns)).cuda()
    for batch in batches:
        inputs = to_gpu(make_inputs(model.mix, batch))
        rows = _tables_read(model, inputs, batch)
        read = sum(t.nbytes for t in tree_leaves(inputs)) + rows
        written = batch * model.mix.width * 4.0
        name = f"E{columns} columns"
        yield Case(name, batch, model.columns, inputs, read, written, compile_seconds=compile_seconds)
        yield whole(f"E{columns} whole", batch, model, inputs, rows, compile_seconds)


def _tables_read(model: ManyColumns, inputs: tuple[Any, ...], batch: int) -> float:
    """Bytes of distinct rows, at most a table each."""
    lookups = [(m.table.weight, batch) for m in (*model.columns.floats, *model.columns.ids)]  # type: ignore[union-attr]
    lookups += [(m.weight, len(values)) for m, (values, _) in zip(model.columns.bags, inputs[3], strict=True)]  # type: ignore[arg-type]
    rows = sum(min(n * max(SECTOR, 4 * w.shape[1]), w.nbytes) for w, n in lookups)  # type: ignore[union-attr,operator]
    return float(rows) + sum(m.boundaries.nbytes for m in model.columns.floats)  # type: ignore[union-attr,operator,misc]


class Bags(nn.Module):
    """T tables of pooled bags, concatenated: [B, T * D]."""

    def __init__(self, tables: int, rows: int, dim: int, dtype: torch.dtype, device: str = "cuda") -> None:
        super().__init__()
        make = {"mode": "sum", "include_last_offset": True, "device": device, "dtype": dtype}
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, dim, **make) for _ in range(tables))  # type: ignore[arg-type]

    def forward(self, ids: list[Tensor], offsets: list[Tensor]) -> Tensor:
        return torch.cat([bag(i, o) for bag, i, o in zip(self.bags, ids, offsets, strict=True)], dim=1)


def micro24(
    dtype: torch.dtype, ids: str = "uniform", batch: int = 2048, rows: int = 500_000, pooling: int = 150
) -> Case:
    """The shape of "Pushing the Performance Envelope of DNN-based Recommendation Systems Inference on GPUs"
    (Jain et al., MICRO 2024): 12 tables of 500K x 128, 150 ids a bag. ids: a kind that make_ids knows."""
    tables, dim = 12, 128
    g = torch.Generator("cuda").manual_seed(0)
    values = [make_ids(ids, batch * pooling, rows, g) for _ in range(tables)]
    offsets = [torch.arange(0, batch * pooling + 1, pooling, device="cuda") for _ in range(tables)]
    row = dim * dtype.itemsize
    read, written = tables * batch * pooling * (8.0 + row), float(tables * batch * row)
    name = f"MICRO'24 {str(dtype).removeprefix('torch.')} {ids}"
    seconds = (8.0, 8.0) if dtype == torch.float32 and ids == "uniform" else (math.inf, math.inf)
    module = Bags(tables, rows, dim, dtype)
    return Case(name, batch, module, (values, offsets), read, written, compile_seconds=seconds)


def long_bags(batch: int, pooling: int = 10_000, rows: int = 500_000) -> Case:
    """A user's whole history in one bag: few bags, each of many ids."""
    dim = 128
    ids = [torch.randint(0, rows, (batch * pooling,), device="cuda")]
    offsets = [torch.arange(0, batch * pooling + 1, pooling, device="cuda")]
    module = Bags(1, rows, dim, torch.float32)
    read = batch * pooling * (8.0 + 4 * dim)
    return Case(f"bags of {pooling:,}", batch, module, (ids, offsets), read, 4.0 * batch * dim)


class DLRM(nn.Module):
    """Naumov et al., arXiv:1906.00091: bottom MLP, one-hot tables, dots of all pairs, top MLP, all in one dtype.

    forward(dense [B, 13], ids int64 [B, 26]) -> [B, 1].
    """

    i: Tensor
    j: Tensor

    def __init__(self, dtype: torch.dtype, rows: int = 100_000, dim: int = 64, tables: int = 26) -> None:
        super().__init__()
        made = {"device": "cuda", "dtype": dtype}
        self.tables = nn.ModuleList(nn.Embedding(rows, dim, **made) for _ in range(tables))  # type: ignore[arg-type]
        self.bottom = _tower((13, 512, 256, dim), made)
        pairs = torch.tril_indices(tables + 1, tables + 1, -1, device="cuda")
        self.register_buffer("i", pairs[0].clone())
        self.register_buffer("j", pairs[1].clone())
        self.top = _tower((dim + pairs.shape[1], 512, 512, 256), made)
        self.last = nn.Linear(256, 1, **made)  # type: ignore[arg-type]

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        z = torch.stack([x, *(table(ids[:, t]) for t, table in enumerate(self.tables))], 1)
        pairs = torch.bmm(z, z.transpose(1, 2))[:, self.i, self.j]
        return torch.sigmoid(self.last(self.top(torch.cat([x, pairs], 1))))


def _tower(widths: tuple[int, ...], made: dict[str, Any]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(widths):
        layers += [nn.Linear(n_in, n_out, **made), nn.ReLU()]
    return nn.Sequential(*layers)


def dlrm(batch: int, dtype: torch.dtype) -> Case:
    model = DLRM(dtype).eval()
    g = torch.Generator("cuda").manual_seed(0)
    dense = torch.randn(batch, 13, generator=g, device="cuda").to(dtype)
    ids = torch.randint(0, 100_000, (batch, 26), generator=g, device="cuda")
    rows = batch * 26 * 64.0 * dtype.itemsize
    return whole("DLRM 26 x 64 bf16", batch, model, (dense, ids), rows, (10.0, 60.0))
