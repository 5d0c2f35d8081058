"""DLRM's lookups with the dots of what they find, and what these are."""

from __future__ import annotations

import torch

from fxopt.kernels.columns import reference
from fxopt.kernels.columns.plan import Column, Plan, Source
from fxopt.kernels.interactions.cuda import dot_rows


def example(B, T, D, dtype=torch.bfloat16, device="cpu", ids=torch.int64, packed=True, copied=True, bad_ids="raise"):
    """DLRM's: a dense vector (`copied`) and T lookups in tables of 5, 6, 7... rows, in one row with the dense part."""
    tables = [torch.randn(5 + t, D, device=device).to(dtype) for t in range(T)]
    x = torch.randn(B, D, device=device).to(dtype)
    found = torch.stack([torch.randint(0, 5 + t, (B,), device=device) for t in range(T)], 1).to(ids)
    tensors = [x, found] if packed else [x, *found.unbind(1)]
    columns = [Column(Source(0, lane=1, length=D), None, 0, 0)] if copied else []
    for t in range(T):
        source = Source(1, fixed=((1, t),)) if packed else Source(1 + t)
        columns.append(Column(source, t, 0, (t + copied) * D, name=f"field {t}", table_name=f"table {t}"))
    plan = Plan(tuple(columns), (len(columns) * D,), (str(dtype).removeprefix("torch."),), bad_ids)
    i, j = torch.tril_indices(len(columns), len(columns), -1, device=device)
    return tensors, tables, plan, x, i.contiguous(), j.contiguous(), D + len(i)


def exact(tensors, tables, plan, before, i, j, width):
    (flat,) = reference.columns([t.cpu() for t in tensors], [t.cpu() for t in tables], plan)
    dim = tables[0].shape[1]
    z = flat.view(len(flat), flat.shape[1] // dim, dim).double()
    return dot_rows.reference(z, before.cpu().double(), i.cpu(), j.cpu(), width)


def assert_close(found, expected):
    eps = max(1e-6, torch.finfo(found.dtype).eps)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=eps, atol=1e-4, equal_nan=True)


def bad(bad_ids="raise", device="cpu"):
    """Ids outside their tables at (row 3, column 2) and (row 1, column 4)."""
    arguments = example(6, 5, 16, device=device, bad_ids=bad_ids)
    ids = arguments[0][1]
    ids[3, 1], ids[1, 3] = 6, -7
    return arguments
