"""What is timed on a GPU: modules with their inputs, and the fewest bytes and operations they need."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from bench.models import E, ManyColumns, make_inputs

SECTOR = 32  # bytes that DRAM moves at least


@dataclass(frozen=True)
class Case:
    """bytes_read counts every row looked up, also one that a cache holds from an earlier lookup."""

    name: str
    batch: int
    module: nn.Module
    inputs: tuple[Any, ...]
    bytes_read: float
    bytes_written: float
    flops: float = 0.0
    weight_bytes: float = 0.0
    compiles: bool = False


def to_gpu(x: Any) -> Any:
    return tree_map(lambda t: t.cuda(), x)


def model_e(columns: int, batches: tuple[int, ...]) -> Iterator[Case]:
    """RECom's model E, up to the concat and whole. Boundaries and small tables are read once."""
    model = ManyColumns(E.scaled(columns)).cuda()
    for batch in batches:
        inputs = to_gpu(make_inputs(model.mix, batch))
        read = sum(t.nbytes for t in tree_leaves(inputs)) + _tables_read(model, inputs, batch)
        written = batch * model.mix.width * 4.0
        name, few = f"E{columns}", columns <= 100
        yield Case(f"{name} columns", batch, model.columns, inputs, read, written, compiles=few)
        layers = [m for m in model.top.modules() if isinstance(m, nn.Linear)]
        flops = sum(2.0 * batch * m.in_features * m.out_features for m in layers)
        weights = sum(4.0 * m.in_features * m.out_features for m in layers)
        yield Case(f"{name} whole", batch, model, inputs, read, written, flops, weights, few)


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


def micro24(dtype: torch.dtype, zipf: bool, batch: int = 2048, rows: int = 500_000, pooling: int = 150) -> Case:
    """The shape of "Pushing the Performance Envelope of DNN-based Recommendation Systems Inference on GPUs"
    (Jain et al., MICRO 2024): 12 tables of 500K x 128, 150 ids a bag."""
    tables, dim = 12, 128
    g = torch.Generator("cuda").manual_seed(0)
    uniform = [torch.rand(batch * pooling, generator=g, device="cuda") for _ in range(tables)]
    # A Zipf of exponent 1 by its inverse: the logarithm of the rank is uniform; ranks are scattered over the rows.
    ids = [(rows**u if zipf else u * rows).long().clamp(0, rows - 1) for u in uniform]
    if zipf:
        ids = [i * 7_919 % rows for i in ids]
    offsets = [torch.arange(0, batch * pooling + 1, pooling, device="cuda") for _ in range(tables)]
    row = dim * torch.empty((), dtype=dtype).element_size()
    read = tables * batch * pooling * (8.0 + row)
    name = f"MICRO'24 {str(dtype).removeprefix('torch.')} {'zipf' if zipf else 'uniform'}"
    return Case(name, batch, Bags(tables, rows, dim, dtype), (ids, offsets), read, float(tables * batch * row))


def long_bags(batch: int, pooling: int = 10_000, rows: int = 500_000) -> Case:
    """A user's whole history in one bag: few bags, each of many ids."""
    dim = 128
    ids = [torch.randint(0, rows, (batch * pooling,), device="cuda")]
    offsets = [torch.arange(0, batch * pooling + 1, pooling, device="cuda")]
    module = Bags(1, rows, dim, torch.float32)
    read = batch * pooling * (8.0 + 4 * dim)
    return Case(f"bags of {pooling:,}", batch, module, (ids, offsets), read, 4.0 * batch * dim)


def with_fbgemm(bags: Bags, ids: list[Tensor], offsets: list[Tensor]) -> Callable[[], Tensor]:
    """The same by fbgemm_gpu's table-batched operator, its inputs already in the layout it wants.

    Raises:
        ImportError: fbgemm_gpu is not installed.
    """
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    weights = [bag.weight for bag in bags.bags]
    on_gpu = weights[0].is_cuda  # type: ignore[union-attr,operator]
    place = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
    device = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
    half = weights[0].dtype != torch.float32
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(w.shape[0], w.shape[1], place, device) for w in weights],  # type: ignore[union-attr,index,operator]
        weights_precision=SparseType.BF16 if half else SparseType.FP32,
        output_dtype=SparseType.BF16 if half else SparseType.FP32,
    )
    for mine, theirs in zip(weights, tbe.split_embedding_weights(), strict=True):
        theirs.copy_(mine)  # type: ignore[arg-type]
    starts = itertools.accumulate([0, *(len(i) for i in ids[:-1])])
    ends = [o[:-1] + s for o, s in zip(offsets, starts, strict=True)]
    indices, places = torch.cat(ids), torch.cat([*ends, torch.tensor([sum(map(len, ids))], device=ids[0].device)])
    return lambda: tbe(indices, places)


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
    size = torch.empty((), dtype=dtype).element_size()
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    flops = sum(2.0 * batch * m.in_features * m.out_features for m in layers) + 2.0 * batch * 27 * 27 * 64
    read = dense.nbytes + ids.nbytes + batch * 26 * 64 * size
    weights = float(sum(m.weight.nbytes for m in layers))
    # Floors count TF32 operations; bf16 ones take half as long.
    return Case("DLRM 26 x 64 bf16", batch, model, (dense, ids), read, batch * size, flops / 2, weights, True)
