"""Random plans with their tensors, and the kernel under every instruction set of this CPU."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from fxopt.kernels.build import find
from fxopt.kernels.columns.plan import COMBINED, REGISTERS, Column, Compare, Instr, Offsets, Op, PerRow, Plan, Source
from fxopt.torch_internals.seeds import seed_started

INTS = ("uint8", "int8", "int16", "int32", "int64", "bool")
FLOATS = ("float16", "bfloat16", "float32", "float64")
EXTREME_INTS = (0, 1, -1, 127, 128, 255, 2**31 - 1, -(2**31), 2**53 + 1, 2**63 - 1, -(2**63), -(2**63) + 1)
NAN, INF = float("nan"), float("inf")
EXTREME_FLOATS = (0.0, -0.0, NAN, INF, -INF, 1e-42, 2.0**31, -(2.0**31), 2.0**63, 3e38, 0.5, -0.5)
BOTH_STEPS = (Op.ADD, Op.MUL, Op.RSUB, Op.CLAMP_MIN, Op.CLAMP_MAX, Op.ABS)
INT_STEPS = (*BOTH_STEPS, Op.REMAINDER, Op.FMOD, Op.FLOOR_DIVIDE, Op.AND, Op.OR, Op.XOR, Op.LSHIFT, Op.RSHIFT)
FLOAT_STEPS = (*BOTH_STEPS, Op.DIV, Op.FLOOR, Op.CEIL, Op.TRUNC, Op.SQRT)


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


@dataclass
class RandomCall:
    """Builds columns one by one over `rows` rows; `plan`, `tensors` and `tables` are the call."""

    rng: random.Random
    rows: int
    tensors: list[Tensor] = field(default_factory=list)
    tables: list[Tensor] = field(default_factory=list)
    columns: list[Column] = field(default_factory=list)
    width: int = 0

    @property
    def plan(self) -> Plan:
        return Plan(tuple(self.columns), (self.width,), (self.dtype,))

    def start(self) -> RandomCall:
        self.dtype = self.rng.choice(("float32", "float32", "float64", "float16", "bfloat16"))
        return self

    def add(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def strided(self, tensor: Tensor) -> Tensor:
        """The same values behind other strides."""
        kind = self.rng.randrange(4)
        if kind == 0 or tensor.dim() == 0:
            return tensor
        if kind == 1:
            return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor
        padded = torch.stack([tensor, tensor], dim=-1)
        return padded[..., 0]

    def values(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        extremes = EXTREME_INTS if dtype in INTS else EXTREME_FLOATS
        n = 1
        for size in shape:
            n *= size
        picked = []
        for _ in range(n):
            if self.rng.random() < 0.3:
                picked.append(self.rng.choice(extremes))
            else:
                picked.append(self.rng.randint(-300, 300) if dtype in INTS else self.rng.uniform(-300, 300))
        base = torch.tensor(picked, dtype=torch.int64 if dtype in INTS else torch.float64)
        return self.strided(base.reshape(shape).to(torch_dtype(dtype)))

    def source(self, lanes: int | None, dtype: str) -> Source:
        kind = self.rng.randrange(4)
        rows, lane_dims = self.rows, () if lanes is None else (lanes,)
        if kind == 0:  # one of several features
            lane = None if lanes is None else 2
            return Source(self.add(self.values((rows, 3, *lane_dims), dtype)), lane=lane, fixed=((1, 2),))
        if kind == 1 and lanes is not None:  # a range of a wider tensor
            return Source(self.add(self.values((rows, lanes + 3), dtype)), lane=1, start=2, length=lanes)
        if kind == 2 and rows % 3 == 0 and rows:  # two row dims
            tensor = self.values((rows // 3, 3, *lane_dims), dtype)
            return Source(self.add(tensor), rows=(0, 1), lane=None if lanes is None else 2)
        if kind == 3 and self.columns:  # shared by all rows
            return Source(self.add(self.values(lane_dims, dtype)), rows=(), lane=None if lanes is None else 0)
        return Source(self.add(self.values((rows, *lane_dims), dtype)), lane=None if lanes is None else 1)

    def program(self, dtype: str, rows: int) -> tuple[Instr, ...]:
        """Random steps, then what makes valid ids of anything."""
        steps: list[Instr] = []
        for _ in range(self.rng.randrange(4)):
            steps += self.steps(dtype)
            dtype = steps[-1].dtype
        return (*steps, Instr(Op.CAST, "int64"), Instr(Op.REMAINDER, "int64", rows))

    def steps(self, dtype: str) -> list[Instr]:
        kind = self.rng.randrange(4)
        if kind == 0:
            return [Instr(Op.CAST, self.rng.choice(("int64", "int32", "float32", "float64")))]
        if kind == 1 and dtype in ("float32", "float64", "int64", "int32", "float16"):
            boundaries = self.values((self.rng.choice((0, 1, 5, 100, 300)),), dtype)
            if self.rng.random() < 0.7:
                boundaries = boundaries.sort().values
            result, right = self.rng.choice(("int64", "int32")), self.rng.randrange(2)
            return [Instr(Op.BUCKETIZE, result, right, tensor=self.add(boundaries))]
        if kind == 2:
            compare = self.rng.choice(list(Compare))
            a, b = (self.rng.randint(-5, 100), self.rng.randint(0, 100)) if dtype in INTS else (1.5, -3.25)
            if dtype == "bool":
                return [Instr(Op.CAST, "int64")]
            if dtype == "uint8":
                a = abs(a)
            if dtype in INTS and self.rng.random() < 0.5:
                return self.combined(dtype)
            return [Instr(Op.SAVE, dtype), *self.arithmetic(dtype), Instr(Op.WHERE, dtype, a, b, compare=compare)]
        return self.arithmetic(dtype)

    def combined(self, dtype: str) -> list[Instr]:
        """As x ^ (x >> 16), or ~x + (x << 21)."""
        op_, at = self.rng.choice(COMBINED), self.rng.randrange(REGISTERS)
        inner = self.combined(dtype) if at and self.rng.random() < 0.5 else self.arithmetic(dtype)
        swapped = [Instr(Op.SWAP, dtype, b=at), *self.arithmetic(dtype)] if self.rng.random() < 0.5 else []
        return [Instr(Op.SAVE, dtype, b=at), *inner, *swapped, Instr(Op.COMBINE, dtype, int(op_), at)]

    def arithmetic(self, dtype: str) -> list[Instr]:
        if dtype == "bool":
            return [Instr(Op.CAST, "int32")]
        if dtype in INTS:
            op_ = self.rng.choice(INT_STEPS)
            a = self.rng.choice((1, 2, 3, 7, 100, 1000003, -1, -7) if op_ != Op.AND else (1, 63, 255, -16))
            if dtype in ("uint8", "int8", "int16"):
                a = self.rng.choice((1, 2, 3, 7, 100))
            if op_ in (Op.LSHIFT, Op.RSHIFT):
                a = self.rng.randrange(torch.iinfo(torch_dtype(dtype)).bits)
            return [Instr(op_, dtype, a)]
        big = 1e30 if dtype in ("float32", "float64") else 1e3
        return [Instr(self.rng.choice(FLOAT_STEPS), dtype, self.rng.choice((0.1, 3.0, -2.5, big, 0.0)))]

    def table(self, rows: int, dim: int) -> int:
        table = torch.randn(rows, dim, dtype=torch.float64).to(torch_dtype(self.dtype))
        self.tables.append(self.strided(table))
        return len(self.tables) - 1

    def place(self, dim: int, lanes: int = 1) -> dict:
        offset = self.width
        self.width += dim * lanes
        return {"output": 0, "offset": offset}

    def factor(self, source: Source | None) -> Source | None:
        """Weights or divisors: tame floats."""
        if source is not None:
            old = self.tensors[source.tensor]
            self.tensors[source.tensor] = torch.rand(old.shape).add(0.5).to(torch_dtype(self.dtype))
        return source

    def lookup(self) -> None:
        rows, dim = self.rng.choice((1, 7, 1000)), self.rng.choice((1, 3, 8, 16, 33, 64, 130))
        dtype = self.rng.choice(INTS + FLOATS)
        lanes = self.rng.choice((None, None, 1, 4, 300))
        self.columns.append(
            Column(
                self.source(lanes, dtype),
                self.table(rows, dim),
                program=self.program(dtype, rows),
                wrap_negative=self.rng.random() < 0.2,
                **self.place(dim, lanes or 1),
            )
        )

    def dense_pool(self) -> None:
        rows, dim = self.rng.choice((1, 7, 1000)), self.rng.choice((1, 3, 8, 64, 130))
        dtype, lanes = self.rng.choice(INTS), self.rng.choice((1, 5, 17, 300))
        pool = self.rng.choice(("sum", "mean", "max"))
        source = self.source(lanes, dtype)
        weighted, divided = pool != "max" and self.rng.random() < 0.4, self.rng.random() < 0.3
        self.columns.append(
            Column(
                source,
                self.table(rows, dim),
                program=self.program(dtype, rows),
                pool=pool,
                weights=self.factor(Source(self.add(torch.empty(self.rows, lanes)), lane=1)) if weighted else None,
                divisor=self.divisor() if divided else None,
                padding=0 if self.rng.random() < 0.3 else None,
                empty_nan=self.rng.random() < 0.5,
                **self.place(dim),
            )
        )

    def divisor(self) -> PerRow:
        source = self.factor(Source(self.add(torch.empty(self.rows))))
        return PerRow(source, (Instr(Op.ADD, "float32", 0.5),) if self.rng.random() < 0.3 else ())

    def masked(self) -> None:
        """A padded row of which some lanes count: by a length, by a compare in the program, or both."""
        rows, dim = self.rng.choice((1, 7, 1000)), self.rng.choice((1, 3, 8, 64, 130))
        dtype, lanes = self.rng.choice(INTS + FLOATS), self.rng.choice((1, 5, 17, 300))
        pool = self.rng.choice(("sum", "mean", "max"))
        kinds = ("filled", "lowered") if pool == "max" and self.dtype in ("float32", "float64") else ("filled",)
        source, table = self.source(lanes, dtype), self.table(rows, dim)
        program, lengths = list(self.program(dtype, rows)), None
        by_ids, by_length = self.rng.choice(((True, False), (False, True), (True, True)))
        if by_ids:
            after, seen = self.rng.choice(((0, dtype), (len(program), "int64")))
            compare = self.rng.choice(list(Compare))
            a = self.rng.randint(0, 3) if seen in INTS else 0.5
            a = min(a, 1) if seen == "bool" else a
            program.insert(after, Instr(Op.KEEP, seen, a, compare=compare))
        if by_length:
            lengths = self.lengths(lanes)
        divisors = (None, PerRow(None, (Instr(Op.CAST, "float32"), Instr(Op.ADD, "float32", 0.5))), self.divisor())
        values = (1.0, -2.0, 1e9 if "lowered" in kinds else 1e4)
        masked = self.rng.choice(kinds if pool == "max" else ("filled", "scaled"))
        if self.rng.random() < 0.3:
            self.tables[table][self.rng.randrange(rows), self.rng.randrange(dim)] = self.rng.choice((NAN, INF, -INF))
        self.columns.append(
            Column(
                source,
                table,
                program=tuple(program),
                pool=pool,
                lengths=lengths,
                masked=masked,
                masked_value=self.rng.choice(values) if pool == "max" else 0.0,
                divisor=self.rng.choice(divisors) if pool == "sum" else None,
                empty_nan=self.rng.random() < 0.5,
                **self.place(dim),
            )
        )

    def lengths(self, lanes: int) -> PerRow:
        dtype = self.rng.choice(("int64", "int32", "uint8", "float32", "float64"))
        values = [self.rng.choice((0, 1, lanes // 2, lanes, lanes + 1, 200)) for _ in range(self.rows)]
        if dtype != "uint8":
            values = [self.rng.choice((v, v, -1, -(2**31), 2**31 - 1)) for v in values]
        if dtype in FLOATS:
            values = [self.rng.choice((v, v, v + 0.5, NAN, INF, -INF)) for v in values]
        source = Source(self.add(self.strided(torch.tensor(values).to(torch_dtype(dtype)))))
        steps = (Instr(Op.CAST, "int64"), Instr(Op.ADD, "int64", 1)) if dtype == "int32" else ()
        return PerRow(source, steps)

    def bag(self) -> None:
        rows, dim = self.rng.choice((1, 7, 1000)), self.rng.choice((1, 3, 8, 32, 64, 130))
        lengths = [self.rng.choice((0, 0, 1, 3, 40, 300)) for _ in range(self.rows)]
        ends = torch.tensor([0, *lengths]).cumsum(0)
        include_last = self.rng.random() < 0.5
        offsets = (ends if include_last else ends[:-1]).to(self.rng.choice((torch.int64, torch.int32)))
        dtype, pool = self.rng.choice(INTS), self.rng.choice(("sum", "mean", "max"))
        n = int(ends[-1])
        weighted = pool == "sum" and self.rng.random() < 0.5
        self.columns.append(
            Column(
                Source(self.add(self.values((n,), dtype))),
                self.table(rows, dim),
                program=self.program(dtype, rows),
                pool=pool,
                bag=Offsets(self.add(self.strided(offsets)), include_last),
                weights=self.factor(Source(self.add(torch.empty(n)))) if weighted else None,
                padding=0 if self.rng.random() < 0.3 else None,
                empty_nan=self.rng.random() < 0.2,
                **self.place(dim),
            )
        )

    def copy(self) -> None:
        lanes = self.rng.choice((None, 1, 13))
        dtype = self.rng.choice((self.dtype, "float32", "int64"))
        program = tuple(self.steps(dtype)) if self.rng.random() < 0.3 else ()
        self.columns.append(Column(self.source(lanes, dtype), None, program=program, **self.place(1, lanes or 1)))

    def more(self) -> None:
        """Adds one more lookup onto an earlier plain one."""
        earlier = [c for c in self.columns if c.table is not None and c.pool == "none" and c.source.lane is None]
        if earlier:
            first = self.rng.choice(earlier)
            rows, dim = 7, self.tables[first.table].shape[1]
            source = Source(self.add(self.values((self.rows,), "int64")))
            column = Column(source, self.table(rows, dim), 0, first.offset, self.program("int64", rows), add=True)
            self.columns.append(column)


@pytest.fixture
def random_call() -> Callable[..., RandomCall]:
    def make(seed: int, rows: int, n_columns: int, kinds: tuple[str, ...]) -> RandomCall:
        seed_started(seed)
        call = RandomCall(random.Random(seed), rows).start()
        for _ in range(n_columns):
            getattr(call, call.rng.choice(kinds))()
        return call

    return make


@pytest.fixture(params=["avx512", "avx2", "scalar"])
def isa(request):
    """The kernel that a file tests as `op`, limited to an instruction set: a CPU without it runs the next lower one."""
    tested = request.module.op
    tested.OPERATORS.compiled()
    path = find(tested.KERNEL)
    if path is None:
        pytest.skip("no compiled kernel: no C++ compiler")
    choose = getattr(ctypes.CDLL(str(path)), f"{tested.KERNEL.name}_isa")
    choose(request.param.encode())
    yield request.param
    choose(None)
