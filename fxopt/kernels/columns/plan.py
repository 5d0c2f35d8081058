"""The columns operator's program, as data: which ids, what is done to them, which table, where to.

A plan is table-driven (RECom's one kernel for all columns, without its code generation): one compiled
library interprets every model's plan. Letters: B rows of an output, L ids of a row, D table dim, R table rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum


@dataclass(frozen=True)
class Source:
    """A strided view of `tensors[tensor]` with one value per (row, lane).

    value(row, lane) = t[..] where the dims in `rows` take the row index (two dims: row = r0 * size(rows[1]) + r1),
    dim `lane` takes start + lane, and each (dim, index) of `fixed` takes that index.

    rows: one or two dims (outermost first), or () for a value shared by all rows.
    lane: the dim that holds the L ids of one row, None when there is one.
    length: number of lanes, None for size(lane) - start. An expanded dim (stride 0) is fine everywhere.
    """

    tensor: int
    rows: tuple[int, ...] = (0,)
    lane: int | None = None
    start: int = 0
    length: int | None = None
    fixed: tuple[tuple[int, int], ...] = ()


class Op(IntEnum):
    """One step of an index program on a value v. `dtype` is the dtype of its result.

    Integer arithmetic wraps at the width of `dtype`; float arithmetic rounds to `dtype` after every step;
    remainder and floor_divide follow Python's signs (torch.remainder, torch.floor_divide).
    Compare operands and constants are given in the dtype of the value compared.
    """

    CAST = 1  # v.to(dtype)
    ADD = 2  # v + a
    MUL = 3  # v * a
    RSUB = 4  # a - v
    DIV = 5  # v / a, floats only
    REMAINDER = 6  # v % a, integers
    FMOD = 7  # fmod(v, a), integers
    FLOOR_DIVIDE = 8  # v // a, integers
    CLAMP_MIN = 9  # max(v, a); NaN stays NaN
    CLAMP_MAX = 10  # min(v, a); NaN stays NaN
    AND = 11  # v & a
    ABS = 12
    FLOOR = 13
    CEIL = 14
    SQRT = 15
    BUCKETIZE = 16  # boundaries = tensors[tensor] (1-D), right = a (0 or 1); NaN gives len(boundaries)
    ADD_TENSOR = 17  # v + tensors[tensor][k], k = the lane, or the second row index where rows has two dims
    SAVE = 18  # saved[b] = v; there are REGISTERS of them
    WHERE = 19  # v = b if compare(saved[0], a) else v
    TRUNC = 20
    KEEP = 21  # a lane counts only if compare(v, a) here: the mask of a padded row. v itself passes on
    OR = 22  # v | a
    XOR = 23  # v ^ a
    LSHIFT = 24  # v << a, 0 <= a < bits
    RSHIFT = 25  # v >> a, 0 <= a < bits; the sign stays
    SWAP = 26  # v and saved[b] change places
    COMBINE = 27  # v op saved[b], integers; a is the number of the op, one of COMBINED


REGISTERS = 2
COMBINED = (Op.ADD, Op.MUL, Op.RSUB, Op.AND, Op.OR, Op.XOR)


class Compare(IntEnum):
    EQ = 0
    NE = 1
    LT = 2
    LE = 3
    GT = 4
    GE = 5


@dataclass(frozen=True)
class Instr:
    """`dtype` names a torch dtype ("int64", "float32", ...); a and b are ints or floats as `dtype` asks."""

    op: Op
    dtype: str
    a: int | float = 0
    b: int | float = 0
    tensor: int = -1
    compare: Compare = Compare.EQ


@dataclass(frozen=True)
class PerRow:
    """One number a row: `program` on the source's value, or with no source on how many lanes count (int64)."""

    source: Source | None
    program: tuple[Instr, ...] = ()


@dataclass(frozen=True)
class Offsets:
    """Jagged bags: row b holds the flat positions [o[b], o[b + 1]) of the ids (nn.EmbeddingBag's offsets).

    Without pooling, the output has a row for each id of the feature, from the first of its first bag on.

    include_last: `tensor` has B + 1 entries; else B, and the last bag ends with the ids.
    segment / segments: the offsets of `segments` features back to back (KeyedJaggedTensor); this is feature `segment`,
    so row b reads entry segment * B + b with B = (size - include_last) / segments.
    """

    tensor: int
    include_last: bool = False
    segment: int = 0
    segments: int = 1


@dataclass(frozen=True)
class Column:
    """One embedding column, or (table None) a plain copy of float values.

    pool: "none" writes lane l's row at offset + l * D; "sum", "mean", "max" reduce over the lanes or the bag.
    bag: jagged bags; the source is then 1-D, rows=(0,), and its flat position is the bag's.
    weights: one float per id, same layout as the ids (per-sample weights, or a padding mask), sum and mean only:
        sum of w * row; a mean divides by the number of ids, as torch does for a dense `.mean`.
    padding: an id that is left out of its bag (EmbeddingBag's padding_idx; after the index program). Pooling only.
    frozen: a row that is read as any other and whose gradient stays zero (Embedding's padding_idx). Not of bags.
    lengths: of a padded row, lane l counts only if l < length; any integer or float dtype.
    masked: what a lane gives that does not count, by `lengths` or a KEEP of the program: "scaled", its row * 0 (sum
        and mean, which stays one over all lanes); "filled", masked_value (0 in sums); "lowered", its row - masked_value
        (max; fp32 and fp64 tables). Its id is checked like any other, and its row need not be read where it cannot
        change the result (a row that is not finite does: 0 * inf is NaN). Pooling of padded rows only.
    divisor: each row of the result is divided by this value (a masked mean's denominator).
    shared_grad: equal maxima share the gradient (amax), and not the first takes it (max).
    empty_nan: a mean as `.mean(1)` gives it, NaN over no ids and rounded once; otherwise as EmbeddingBag does, 0 over
        no ids and the sum rounded before it is divided (which halves can overflow).
    wrap_negative: ids in [-R, -1] count from the end (weight[idx]); else they are errors (F.embedding).
    add: accumulate onto what earlier columns wrote to this slot, in plan order (the wide part's sum).
    runtime_error: torch raises RuntimeError for a bad id here (embedding_bag, one_hot), and not IndexError.
    name: what an error message calls it ("column 3 (emb.3)").
    """

    source: Source
    table: int | None
    output: int
    offset: int
    program: tuple[Instr, ...] = ()
    pool: str = "none"
    bag: Offsets | None = None
    weights: Source | None = None
    padding: int | None = None
    frozen: int | None = None
    lengths: PerRow | None = None
    masked: str = "scaled"
    masked_value: float = 0.0
    divisor: PerRow | None = None
    shared_grad: bool = False
    empty_nan: bool = False
    wrap_negative: bool = False
    add: bool = False
    runtime_error: bool = False
    name: str = ""
    table_name: str = ""

    @property
    def segment(self) -> Offsets | None:
        """Of a feature that is not pooled: which ids are its own."""
        return self.bag if self.pool == "none" else None

    @property
    def is_masked(self) -> bool:
        return self.lengths is not None or any(instr.op is Op.KEEP for instr in self.program)


@dataclass(frozen=True)
class Plan:
    """All columns of one call, sorted by nothing: plan order is semantic only for `add`.

    widths: elements per row of each output; None where the one column in it has a number of lanes known
        only at run time (width L * D).
    dtypes: torch dtype name of each output. All outputs are contiguous [rows, width].
    bad_ids: what CUDA does with an id outside its table, one of Config's; the CPU always raises.
    """

    columns: tuple[Column, ...]
    widths: tuple[int | None, ...]
    dtypes: tuple[str, ...]
    bad_ids: str = "raise"

    def of(self, columns: Sequence[Column]) -> tuple[Plan | None, tuple[int, ...]]:
        """These columns alone, None for none, and the outputs they write, which that plan numbers from 0 on. The first
        one left in a slot no longer adds to another."""
        if not columns:
            return None, ()
        outputs = tuple(sorted({c.output for c in columns}))
        numbered = {output: i for i, output in enumerate(outputs)}
        kept: list[Column] = []
        written = set()
        for column in columns:
            slot = (column.output, column.offset)
            kept.append(replace(column, output=numbered[column.output], add=column.add and slot in written))
            written.add(slot)
        widths, dtypes = tuple(self.widths[o] for o in outputs), tuple(self.dtypes[o] for o in outputs)
        return replace(self, columns=tuple(kept), widths=widths, dtypes=dtypes), outputs
