"""Random embedding columns: source > index program > lookup > pooling, in the many ways in which people write them."""

from __future__ import annotations

import torch

from tests.properties.inputs import LAYOUTS
from tests.properties.programs import Table, Value, Writer

INTS = (torch.int64, torch.int64, torch.int32)
FLOATS = (torch.float32, torch.float32, torch.float64)
TABLES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
DIMS = (1, 3, 8, 8, 130)
ROWS = (8, 9, 20, 100)

_ANY_STEPS = (
    "{x} + {c}",
    "{c} + {x}",
    "{x} - {c}",
    "{c} - {x}",
    "{x} * {c}",
    "{x} / {c}",
    "{x} % {c}",
    "torch.fmod({x}, {c})",
    "{x} // {c}",
    "torch.div({x}, {c}, rounding_mode='floor')",
    "torch.div({x}, {c}, rounding_mode='trunc')",
    "torch.rsub({x}, {c})",
    "torch.add({x}, {c}, alpha=2)",
    "{x}.clamp({c}, {d})",
    "torch.clip({x}, max={c})",
    "{x}.clamp_min({c})",
    "{x}.abs()",
    "-{x}",
    "torch.where({x} {compare} {c}, {d}, {x})",
    "torch.where({x} {compare} {c}, {x}, {d})",
    "torch.where({x} {compare} {c}, torch.zeros_like({x}), {x})",
    "torch.where({x} {compare} {c}, {x}, torch.full_like({x}, {d}))",
    "torch.where(~({x} {compare} {c}), {x}, {d})",
    "{x}.masked_fill({x} {compare} {c}, {d})",
    "{x}.masked_fill(torch.logical_not({x} {compare} {c}), {d})",
    "torch.where({x} {compare} {c}, {d}, {x} + {c})",
    "({x} {compare} {c}).long()",
    "{x}.to({dtype})",
    "{x}.to({dtype})",
    "{x}.contiguous()",
    "{x}.clone()",
    "{x} * {x}",
    "torch.where({x} {compare} {c}, {x}, {x} % 5)",
)
_INT_STEPS = ("{x} & {c}", "{x} & 7", "torch.bitwise_and({x}, {c})", "{x} ^ {c}", "{x} << 1", "{x}.remainder({c})")
_FLOAT_STEPS = (
    "{x}.floor()",
    "{x}.ceil()",
    "torch.trunc({x})",
    "{x}.sqrt()",
    "torch.log1p({x}.abs())",
    "{x}.nan_to_num()",
)
_COMPARES = ("==", "!=", "<", "<=", ">", ">=")
_CONSTANTS = (1, 2, 3, 4, 7, 0, -1, -3, 11, 100, 2**31 - 1, -(2**63), 2**40)
_FLOAT_CONSTANTS = (1, 2, 0.5, -1.5, 0.1, 0, -0.0, 3.0, 100, 1e10, 1e39, 16777217)
_CASTS = (
    "torch.int64",
    "torch.int64",
    "torch.int32",
    "torch.float32",
    "torch.float64",
    "torch.float16",
    "torch.bfloat16",
)
_SMALL_INTS = ("torch.int16", "torch.int8", "torch.uint8")

_LANDINGS = (
    "{x} % {rows}",
    "{x}.remainder({rows})",
    "{x}.clamp(0, {last})",
    "torch.clamp({x}, min=0).clamp(max={last})",
    "torch.clip({x}, 0, {last})",
    "torch.where({x} < 0, 0, {x}).clamp_max({last})",
    "torch.where({x} >= {rows}, 0, {x}).clamp_min(0)",
    "{x}.masked_fill({x} < 0, 1) % {rows}",
    "torch.fmod({x}, {rows}).abs()",
    "{x}.abs() % {rows}",
    "{x} & 7",
)


def source(w: Writer, one_dim: bool, wild: bool) -> Value:
    """A tensor [B], or [B, k] with k lanes, that ids are made from."""
    dtype = w.pick((*INTS, *FLOATS, torch.int64, torch.float32))
    options = {"dtype": dtype, "wild": wild, "layout": w.pick((*LAYOUTS[:1], *LAYOUTS))}
    if not one_dim:
        if w.chance(70):
            return w.input(dims=("B", w.pick(("L", "L", 1, 3))), **options)
        packed = w.input(dims=("B", 7), **options)
        written = w.line(
            w.pick(("{x}[:, 2:5]", "{x}[:, :4]", "{x}[:, 3:]", "{x}.narrow(1, 1, 3)", "{x}.split(3, 1)[1]")).format(
                x=packed.name
            )
        )
        assert written is not None
        return written
    kind = w.pick(("own", "own", "column", "packed", "fields", "one"))
    if kind == "own":
        return w.input(dims=("B",), **options)
    if kind == "one":
        return w.input(dims=("B", 1), **options)
    i = w.pick(range(5))
    if kind == "column":
        ways = ("{x}[:, {i}:{j}]", "{x}.narrow(1, {i}, 1)", "{x}.split(1, 1)[{i}]", "{x}[:, {i}:{j}].squeeze(1)")
        x = w.input(dims=("B", 5), **options)
    elif kind == "packed":
        ways = (
            "{x}[:, {i}]",
            "{x}.select(1, {i})",
            "{x}.unbind(1)[{i}]",
            "{x}.t()[{i}]",
            "{x}[:, -1]",
            "{x}[..., {i}]",
        )
        x = w.input(dims=("B", 5), **options)
    else:
        ways = ("{x}[{i}]", "{x}.t()[:, {i}]", "{x}.unbind(0)[{i}]")
        x = w.input(dims=(5, "B"), **options)
    written = w.line(w.pick(ways).format(x=x.name, i=i, j=i + 1))
    assert written is not None
    return written


def step(w: Writer, x: Value) -> Value:
    """One operation on x; x itself where eager has no such operation on its dtype."""
    templates = _ANY_STEPS + (_FLOAT_STEPS if x.floats else _INT_STEPS)
    constants = _FLOAT_CONSTANTS if x.floats or w.chance(5) else _CONSTANTS
    # What a float beyond an 8- or 16-bit integer's range becomes differs between eager's own vector and scalar loops.
    dtypes = _CASTS if x.floats else _CASTS + _SMALL_INTS
    template = w.pick(templates)
    constants = [c for c in constants if not _is_torchs_own(template, c, x)]
    expression = template.format(
        x=x.name, c=w.pick(constants), d=w.pick(constants), compare=w.pick(_COMPARES), dtype=w.pick(dtypes)
    )
    written = w.line(expression)
    if written is None or written.sample.shape != x.sample.shape or written.sample.dtype is torch.bool:
        return x
    return written


def _is_torchs_own(template: str, c: float, x: Value) -> bool:
    """Whether torch itself has two answers: its division crashes for the smallest integer by -1; an overflown quotient
    has another remainder in its vector loop than in its scalar one; its fake sum refuses twice the smallest integer."""
    if "trunc" in template:
        return c == -1
    if "{x} % {c}" in template or "fmod" in template:
        return x.floats and 0 < abs(c) < 1
    return "alpha=2" in template and c == -(2**63)


def edges(w: Writer, count: int, dtype: torch.dtype) -> str:
    values = torch.linspace(0, 7, count) if w.chance(70) else (torch.arange(count) // 2).float()
    if dtype.is_floating_point and count > 2 and w.chance(20):
        values[0], values[-1] = -torch.inf, torch.inf
    return w.buffer(values.to(dtype))


def landed(w: Writer, x: Value, rows: int) -> Value:
    """Most of x's values inside a table."""
    if x.floats and w.chance(70):
        boundaries = edges(w, rows - 1, x.dtype)
        way = w.pick(
            (
                "torch.bucketize({x}, {e})",
                "torch.bucketize({x}, {e}, right=True)",
                "torch.bucketize({x}, {e}, out_int32=True)",
                "torch.searchsorted({e}, {x}, right=True)",
                "torch.searchsorted({e}, {x}, side='right')",
                "torch.searchsorted({e}, {x})",
            )
        )
        return w.line(way.format(x=x.name, e=boundaries)) or x
    if not x.floats and x.dtype in INTS and w.chance(10):
        return w.line(f"torch.bucketize({x.name}, {edges(w, rows - 1, x.dtype)})") or x
    if x.floats:
        x = w.line(w.pick(("{x}.long()", "{x}.int()", "{x}.to(torch.int64)")).format(x=x.name)) or x
    return w.line(w.pick(_LANDINGS).format(x=x.name, rows=rows, last=rows - 1)) or x


def ids(w: Writer, rows: int, one_dim: bool) -> Value:
    """int32 or int64 ids for a table."""
    wild = w.chance(40)
    x = source(w, one_dim, wild)
    count = w.pick((0, 0, 0, 1, 1, 1, 2, 2, 3, 6))
    for _ in range(count):
        x = step(w, x)
    if x.floats or w.chance(95 if wild or count else 50):
        x = landed(w, x, rows)
    if x.dtype not in INTS:
        x = w.line(w.pick(("{x}.long()", "{x}.to(torch.int64)", "{x}.type(torch.int32)")).format(x=x.name)) or x
    return x


def table(w: Writer, dtype: torch.dtype, dim: int, module: str = "") -> Table:
    rows = w.pick(ROWS)
    padding = w.pick((None, None, None, 0, 3, -1))
    options = f", padding_idx={padding}" if padding is not None else ""
    return Table(rows, dim, dtype, module and f"{module}({rows}, {dim}{options})", special=w.chance(8))


def lookup(w: Writer, dtype: torch.dtype, dim: int, one_dim: bool) -> Value | None:
    """[B, D], or [B, k, D] for lanes."""
    kind = w.pick(("module", "module", "functional", "index", "select", "one_hot"))
    made = table(w, dtype, dim, "Embedding" if kind == "module" else "")
    if kind == "one_hot" and made.special:  # 0 * inf
        kind = "functional"
    id_value = ids(w, made.rows, one_dim)
    return looked_up(w, kind, made, w.table(made), id_value)


def looked_up(w: Writer, kind: str, made: Table, name: str, x: Value) -> Value | None:
    shape = (*x.sample.shape, made.dim)
    if kind == "select" and x.sample.dim() != 1:
        kind = "index"
    padding = w.pick(("", "", ", padding_idx=1", ", padding_idx=-1"))
    ways = {
        "module": "{t}({x})",
        "functional": "F.embedding({x}, {t}" + padding + ")",
        "index": "{t}[{x}]",
        "select": w.pick(("{t}.index_select(0, {x})", "torch.index_select({t}, 0, {x})")),
        "one_hot": w.pick(
            (
                "F.one_hot({x}.long(), {r}).to({d}) @ {t}",
                "torch.matmul(F.one_hot({x}.long(), num_classes={r}).to({d}), {t})",
            )
        ),
    }
    return w.line(ways[kind].format(t=name, x=x.name, r=made.rows, d=made.dtype), torch.zeros(shape, dtype=made.dtype))


def bag(w: Writer, dtype: torch.dtype, dim: int) -> Value | None:
    """[B, D] from nn.EmbeddingBag or F.embedding_bag."""
    mode = w.pick(("sum", "sum", "mean", "max"))
    made = table(w, dtype, dim)
    padding = w.pick((None, None, 0, 2, -1))
    weighted = mode == "sum" and w.chance(40)
    as_module = w.chance(50)
    include_last = w.chance(40)
    options = f", mode='{mode}'" + (f", padding_idx={padding}" if padding is not None else "")
    if w.chance(35):
        x = ids(w, made.rows, one_dim=False)
        sample = torch.zeros(x.sample.shape[0], dim, dtype=dtype)
        weights = ""
        if weighted:
            given = w.line(f"torch.ones({x.name}.shape, dtype={dtype}) * 0.5")
            weights = f", per_sample_weights={given.name}" if given else ""
        return w.line(_bag_call(w, made, x.name, weights, options, as_module), sample)
    offset_dtype = w.pick(INTS)
    jagged, offsets, factors = w.bag(
        dims=("N",),
        dtype=offset_dtype if w.chance(90) else w.pick(INTS),
        offsets=offset_dtype,
        floats=dtype,
        include_last=include_last,
        layout=w.pick((*LAYOUTS[:1], *LAYOUTS)),
        wild=w.chance(15),
        spare=include_last and w.chance(25),
    )
    x, sample = jagged, torch.zeros(3, dim, dtype=dtype)
    for _ in range(w.pick((0, 0, 1, 2))):
        x = step(w, x)
    if x is not jagged or w.chance(60):
        x = landed(w, x, made.rows)
    if x.dtype != offsets.dtype and w.chance(80):
        x = w.line(f"{x.name}.to({offsets.dtype})") or x
    options += ", include_last_offset=True" if include_last else ""
    weights = f", per_sample_weights={factors.name}" if weighted else ""
    return w.line(
        _bag_call(
            w,
            made,
            f"{x.name}, offsets={offsets.name}" if not as_module else f"{x.name}, {offsets.name}",
            weights,
            options,
            as_module,
        ),
        sample,
    )


def _bag_call(w: Writer, made: Table, arguments: str, weights: str, options: str, as_module: bool) -> str:
    if as_module:
        name = w.table(
            Table(made.rows, made.dim, made.dtype, f"EmbeddingBag({made.rows}, {made.dim}{options})", made.special)
        )
        return f"{name}({arguments}{weights})"
    first, *rest = arguments.split(", ")
    return f"F.embedding_bag({', '.join([first, w.table(made), *rest])}{weights}{options})"


_POOLINGS = (
    "{e}.sum(1)",
    "{e}.sum(dim=-2)",
    "torch.sum({e}, dim=(1,))",
    "{e}.mean(1)",
    "{e}.mean(dim=-2)",
    "{e}.amax(1)",
    "{e}.max(1).values",
    "{e}.max(dim=1)[0]",
    "{e}.sum(1, keepdim=True).squeeze(1)",
)
_MASKED = (
    "({e} * {m}.unsqueeze(-1)).sum(1)",
    "({m}.unsqueeze(2) * {e}).sum(1)",
    "({e} * {m}.unsqueeze(-1)).sum(1) / {m}.sum(1, keepdim=True)",
    "({e} * {m}.unsqueeze(-1)).sum(1) / ({m}.sum(1, keepdim=True) + 1e-8)",
    "({e} * {m}[:, :, None]).sum(1) / {m}.sum(1).clamp(min=1).unsqueeze(1)",
    "({e} * {m}.unsqueeze(-1).expand(-1, -1, {d})).sum(1)",
    "({e} * {m}.unsqueeze(-1).repeat(1, 1, {d})).sum(dim=1)",
    "({e} * torch.repeat_interleave({m}.unsqueeze(-1), {d}, dim=-1)).sum(1)",
    "({e} * {m}.unsqueeze(-1).expand_as({e})).sum(1)",
    "torch.bmm({m}.unsqueeze(1), {e}).squeeze(1)",
    "torch.matmul({m}.unsqueeze(1), {e}).squeeze(1)",
    "({e} * {m}.unsqueeze(-1)).mean(1)",
    "({e} - (1 - {m}.unsqueeze(-1)) * 1e4).max(1).values",
    "{e}.masked_fill({m}.unsqueeze(-1) == 0, 0).sum(1)",
    "{e}.sum(1) / {m}.sum(1, keepdim=True)",
    "{e}.mean(1) / ({m}.sum(1, keepdim=True) + 1)",
)


def pooled(w: Writer, dtype: torch.dtype, dim: int) -> Value | None:
    """[B, D]: a padded sequence, looked up and pooled."""
    made = table(w, dtype, dim, w.pick(("Embedding", "")))
    x = ids(w, made.rows, one_dim=False)
    rows = looked_up(w, "module" if made.module else w.pick(("functional", "index")), made, w.table(made), x)
    if rows is None or w.chance(40):
        return rows and w.line(w.pick(_POOLINGS).format(e=rows.name))
    mask = w.line(
        w.pick(("({x} != 0)", "({x} > 2)", "(torch.arange({x}.shape[1]) < {x}.amax(1, keepdim=True))")).format(x=x.name)
        + f".to({dtype})"
    )
    return mask and w.line(w.pick(_MASKED).format(e=rows.name, m=mask.name, d=dim))


def offset_fields(w: Writer, dtype: torch.dtype, dim: int) -> Value | None:
    """[B, F, D]: every field's ids in its own range of one big table."""
    fields, rows = w.pick((1, 3, 5)), 8
    x = w.input(dims=("B", fields), dtype=w.pick(INTS), layout=w.pick(LAYOUTS), wild=w.chance(20), limit=rows)
    if w.chance(50):
        offsets = w.buffer(torch.arange(fields, dtype=x.dtype) * rows)
    else:
        offsets = f"torch.tensor({[i * rows for i in range(fields)]}, dtype={x.dtype})"
    shifted = w.line(w.pick(("{x} + {o}", "{x} + {o}.unsqueeze(0)", "{o} + {x}")).format(x=x.name, o=offsets))
    assert shifted is not None
    made = table(w, dtype, dim, "Embedding")
    made = Table(rows * fields, dim, dtype, f"Embedding({rows * fields}, {dim})", made.special)
    value = looked_up(w, "module", made, w.table(made), shifted)
    return value and (w.line(f"{value.name}.sum(1)") if w.chance(30) else value)
