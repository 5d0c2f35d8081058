"""Fewer bits and lower ranks, only where `Config(precision=.., low_rank=..)` asks for them.

Verification holds every one of them to `Config(max_error=..)`: what exceeds it is rolled back and named.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxopt.config import Config
from fxopt.kernels.columns.quantized import dequantized
from fxopt.kernels.compressed.op import linear, load, rank_for, table_in
from fxopt.patterns.compression import find_large_tables, find_wide_linears
from fxopt.patterns.core import Match
from fxopt.rewrites.core import Replacement, Rewrite
from fxopt.rewrites.editor import Editor, Rejected

_LEAST_DIM = 8  # below it a scale and an offset are most of a row
_SAMPLED_ROWS = 4096
_WHY = "asked for by Config; its error is checked against eager"


def linears_of(config: Config) -> tuple[Rewrite, ...]:
    """The pass over wide linears that a configuration asks for; none by default."""

    def replace_linear(editor: Editor, match: Match) -> Replacement:
        bound = match.bound
        rank = _rank(match, config.low_rank) if config.low_rank is not None else 0
        if not rank and config.precision == "fp32":
            raise Rejected("its weight has no low rank within Config(low_rank=..)")
        load()
        arguments = (bound["x"], bound["weight"], bound["bias"], config.precision, rank)
        small = editor.call(torch.ops.fxopt.compressed_linear.default, *arguments)
        small.meta["bound"] = linear
        what = f"[*, {bound['K']}] x [{bound['K']}, {bound['N']}] in {config.precision}"
        return Replacement({match.anchor: small}, what + (f", rank {rank}" if rank else ""), _WHY)

    why = "before linears are joined; only where it was asked for"
    return (Rewrite("compressed_linears", find_wide_linears, replace_linear, why, True),) if config.lossy else ()


def tables_of(config: Config) -> tuple[Rewrite, ...]:
    """The pass over large tables that a configuration asks for; none by default."""

    def replace(editor: Editor, match: Match) -> Replacement:
        if config.cuda_graphs and match.anchor.args[1][0].meta["val"].is_cuda:  # type: ignore[index, union-attr]
            raise Rejected("Config(cuda_graphs=True) would replay copies of tables that nobody renews")
        return _replace_tables(editor, match, config.precision)

    why = "the tables of columns; only where it was asked for"
    tables = Rewrite("compressed_tables", find_large_tables, replace, why, True)
    return (tables,) if config.precision != "fp32" else ()


def _replace_tables(editor: Editor, match: Match, precision: str) -> Replacement:
    """The same columns on rows of fewer bits."""
    load()
    call, small, rows = match.anchor, {}, list[_Rows]()
    for table in match.bound["large"]:
        weight: Any = table.meta.get("tensor", lambda: None)()
        if weight is None:
            raise Rejected("its tables are not at hand")
        rows.append(_rows_of(weight, precision))
        if rows[-1].name:
            dtype = torch.uint8 if rows[-1].name == "int8" else torch.bfloat16
            small[table] = editor.call(torch.ops.fxopt.compressed_table.default, table, dtype)
            small[table].meta["bound"] = table_in
    if not small:
        raise Rejected(_told(rows))
    tensors, tables, plan = call.args
    columns = editor.call(call.target, tensors, [small.get(table, table) for table in tables], plan)  # type: ignore
    columns.meta |= {key: call.meta[key] for key in ("bound", "rowwise") if key in call.meta}
    values: dict[Node, Node | None] = {
        item: editor.call(operator.getitem, columns, item.args[1]) for item in call.users
    }
    return Replacement(values, _told(rows), _WHY)


@dataclass(frozen=True)
class _Rows:
    """The format of a table's rows, "" where it stays; its bytes before and after; how far off a value is, sampled."""

    name: str
    before: int
    after: int
    error: float


def _rows_of(weight: Tensor, precision: str) -> _Rows:
    wide = precision == "int8" and weight.shape[1] >= _LEAST_DIM
    rows = table_in(weight, torch.uint8 if wide else torch.bfloat16)
    name = {torch.uint8: "int8", torch.bfloat16: "bf16"}.get(rows.dtype, "")
    sample = slice(None, None, max(1, len(weight) // _SAMPLED_ROWS))
    errors = (dequantized(rows[sample]).float() - weight.detach()[sample]).abs()
    error = float(errors.nan_to_num(0.0).max()) if errors.numel() else 0.0  # inf - inf: equal
    return _Rows(name, weight.nbytes, len(rows) * rows.stride(0) * rows.element_size(), error)


def _told(rows: list[_Rows]) -> str:
    """The formats, as the report names them."""
    parts = []
    for name in dict.fromkeys(each.name for each in rows):
        group = [each for each in rows if each.name == name]
        before, after = (sum(sizes) / 2**20 for sizes in zip(*((r.before, r.after) for r in group), strict=True))
        tables = f"{len(group)} {'table' if len(group) == 1 else 'tables'}"
        error = max(each.error for each in group)
        smaller = f"in {name}: {after:,.0f} MB for {before:,.0f}, values off by up to {error:.1e}"
        parts.append(f"{tables} {smaller}" if name else f"{tables} with values that fit no fewer bits")
    return "; ".join(parts)


def _rank(match: Match, error: float) -> int:
    """The rank to use for a weight; 0 where two factors of it are no less work than the weight."""
    weight: Any = match.bound["weight"].meta.get("tensor", lambda: None)()
    if weight is None:
        raise Rejected("its weight is not at hand")
    rank, N, K = rank_for(weight, error), match.bound["N"], match.bound["K"]
    return rank if 0 < rank * (N + K) < 0.8 * N * K else 0
