"""Fewer bits and lower ranks, only where `Config(precision=.., low_rank=..)` asks for them.

Verification holds every one of them to `Config(max_error=..)`: what exceeds it is rolled back and named.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from fxopt.kernels.compressed.op import OPERATORS, linear, rank_for, table_in
from fxopt.patterns.compression import find_large_tables, find_wide_linears
from fxopt.rewrites.embedding_columns import plan_in
from fxopt.rewrites.framework import MEASURED, Editor, Match, Rejected, Replacement, Rewrite
from fxopt.rewrites.row_formats import Rows, Use, rows_of, told

_WHY = "asked for by Config; its error is checked against eager"


def replace_linear(editor: Editor, match: Match) -> Replacement:
    """A wide linear with its weight in fewer bits, or as two of a lower rank."""
    bound, config = match.bound, editor.config
    rank = _rank(match, config.low_rank) if config.low_rank is not None else 0
    if not rank and config.precision == "fp32":
        raise Rejected("its weight has no low rank within Config(low_rank=..)")
    arguments = (bound["x"], bound["weight"], bound["bias"], config.precision, rank)
    small = editor.ours(OPERATORS, "compressed_linear", linear, *arguments)
    what = f"[*, {bound['K']}] x [{bound['K']}, {bound['N']}] in {config.precision}"
    return Replacement({match.anchor: small}, what + (f", rank {rank}" if rank else ""), _WHY)


def replace_tables(editor: Editor, match: Match) -> Replacement:
    """The same columns on rows of fewer bits."""
    config = editor.config
    if config.cuda_graphs is True and match.anchor.args[1][0].meta["val"].is_cuda:  # type: ignore[index, union-attr]
        raise Rejected("Config(cuda_graphs=True) would replay copies of tables that nobody renews")
    call, small, rows = match.anchor, {}, list[Rows]()
    tensors, tables, plan = call.args
    columns = plan_in(editor.module, call).columns
    uses: dict[Any, set[Use]] = {table: set() for table in tables}  # type: ignore[union-attr]
    for column in columns:
        if column.table is not None:
            uses[tables[column.table]].add(Use.of(column))  # type: ignore[index]
    for table in match.bound["large"]:
        weight: Any = table.meta.get("tensor", lambda: None)()
        if weight is None:
            raise Rejected("its tables are not at hand")
        rows.append(rows_of(weight, config.precision, uses[table], timed=config.tune != "off"))
        if rows[-1].pays:
            small[table] = editor.ours(OPERATORS, "compressed_table", table_in, table, rows[-1].dtype)
    if not small:
        raise Rejected(told(rows))
    faster = editor.call(call.target, tensors, [small.get(table, table) for table in tables], plan)  # type: ignore
    faster.meta |= {key: call.meta[key] for key in ("bound", "rowwise") if key in call.meta}
    values: dict[Node, Node | None] = {item: editor.call(operator.getitem, faster, item.args[1]) for item in call.users}
    return Replacement(values, told(rows), _WHY)


def _rank(match: Match, error: float) -> int:
    """The rank to use for a weight; 0 where two factors of it are no less work than the weight."""
    weight: Any = match.bound["weight"].meta.get("tensor", lambda: None)()
    if weight is None:
        raise Rejected("its weight is not at hand")
    rank, N, K = rank_for(weight, error), match.bound["N"], match.bound["K"]
    return rank if 0 < rank * (N + K) < 0.8 * N * K else 0


LINEARS = Rewrite(
    "compressed_linears",
    find_wide_linears,
    replace_linear,
    why="before linears are joined; only where it was asked for",
    policy=MEASURED,
    when=lambda config: config.lossy,
)
TABLES = Rewrite(
    "compressed_tables",
    find_large_tables,
    replace_tables,
    why="the tables of columns; only where it was asked for",
    when=lambda config: config.precision != "fp32",
)
