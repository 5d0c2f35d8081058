"""Statements that move memory: reshapes that scramble and reshapes that do not, slices, cats, broadcasts."""

from __future__ import annotations

from tests.fuzz.writer import Value, Writer

_ANY = (
    "{x}.reshape(-1)",
    "{x}.flatten()",
    "{x}.unsqueeze({i})",
    "{x}.squeeze()",
    "{x}.squeeze({i})",
    "{x}.contiguous()",
    "{x}.clone()",
    "{x}.detach()",
    "{x}.flip({i})",
    "{x}.roll(1, {i})",
    "{x}.roll({k}, {i})",
    "{x}[{x}.shape[0] - 1:]",
    "{x}[:1]",
    "{x}[-1:]",
    "{x}[1:]",
    "{x}[::2]",
    "{x}[0]",
    "{x}.select({i}, -1)",
    "{x}.select({i}, 0)",
    "{x}.narrow({i}, 0, 1)",
    "{x}.repeat_interleave(2, {i})",
    "torch.cat([{x}, {x}], {i})",
    "torch.stack([{x}, {x}], {i})",
    "{x}[..., :1]",
    "{x}[..., 1:]",
    "{x}[..., [0, -1]]",
    "{x}[..., -1]",
    "{x}.unsqueeze(-1).expand(*{x}.shape, {n})",
    "{x}.reshape({x}.shape)",
    "{x}.view({x}.size())",
)
_MATRIX = (
    "{x}.transpose({i}, {j})",
    "{x}.transpose({i}, {j})",
    "{x}.transpose({i}, {j}).reshape({x}.shape)",
    "{x}.transpose({i}, {j}).contiguous().view({x}.shape)",
    "{x}.transpose({i}, {j}).flatten({low}, {high})",
    "{x}.movedim({i}, {j})",
    "{x}.mT",
    "{x}.mT.reshape({x}.shape)",
    "{x}.flatten(1)",
    "{x}.flatten({low}, {high})",
    "{x}.reshape({x}.shape[0], -1)",
    "{x}.reshape(-1, {x}.shape[-1])",
    "{x}.view(-1, {x}.size(-1))",
    "{x}.reshape({x}.shape[1], {x}.shape[0], -1)",
    "{x}.reshape({x}.shape[-1], -1)",
    "{x}.reshape(-1, {n})",
    "{x}.reshape(-1, {n}, {m})",
    "{x}.view({x}.shape[0], -1, {n})",
    "{x}.unflatten(-1, (-1, {n}))",
    "{x}.unflatten(-1, ({n}, -1)).transpose(-1, -2).flatten(-2)",
    "{x}.diagonal(0, {i}, {j})",
    "{x}.tril()",
    "{x}.triu(1)",
    "{x}[:, -1]",
    "{x}[:, 0]",
    "{x}[:, 1:]",
    "{x}[:, ::2]",
    "{x}[:, [1, 0]]",
    "{x}[:, {x}.shape[1] - 1:]",
    "torch.cat([{x}[:, 1:], {x}[:, :1]], 1)",
    "torch.cat([{x}[..., ::2], {x}[..., 1::2]], -1)",
    "torch.stack([t for t in {x}.unbind(1)], 1)",
    "torch.cat([t for t in {x}.unbind(1)], -1)",
    "torch.stack({x}.unbind(1)[::-1], 1)",
    "torch.cat({x}.split(1, 1)[::-1], 1)",
    "torch.cat({x}.chunk(2, -1)[::-1], -1)",
    "torch.stack({x}.chunk(2, -1), 1)",
    "{x}.repeat(1, 2, *[1] * ({x}.dim() - 2))",
    "{x}.repeat(2, *[1] * ({x}.dim() - 1))",
    "{x}[:1].expand_as({x})",
    "{x}[:, :1].expand_as({x})",
    "{x}[..., :1].expand(*{x}.shape[:-1], {n})",
)
_CUBE = (
    "{x}.permute({p})",
    "{x}.permute({p}).reshape({x}.shape)",
    "{x}.permute({p}).contiguous().view({x}.shape)",
    "{x}.permute({p}).flatten(1)",
    "{x}.transpose(1, 2).reshape({x}.shape[0], -1)",
    "{x}.transpose(0, 1).flatten(1)",
    "{x}.transpose(0, 1).reshape({x}.shape[0], -1)",
    "{x}.reshape(-1, {x}.shape[1] * {x}.shape[2])",
    "{x}.flatten(1).unflatten(1, ({x}.shape[2], {x}.shape[1]))",
    "{x}.flatten(0, 1)",
    "{x}[:, 0, :]",
    "{x}[..., None]",
    "{x}[:, :, 0]",
)

_SAME = (
    "{x}.contiguous()",
    "{x}.contiguous().view({x}.shape)",
    "{x}.to({x}.dtype)",
    "{x}.view({x}.shape)",
    "{x}.transpose(0, -1).transpose(0, -1)",
    "{x}.transpose(0, -1).contiguous()",
    "{x}.chunk(1, -1)[0]",
    "{x}[...]",
    "{x} + 0",
    "{x}.clone()",
)


def move(w: Writer) -> Value | None:
    """One variable in another form."""
    x = w.any(lambda v: v.rank > 0)
    if x is None:
        return None
    templates = _ANY if x.rank < 2 else (_MATRIX + _ANY) if x.rank < 3 else (*_CUBE, *_CUBE, *_MATRIX, *_ANY)
    return w.line(_filled(w, w.pick(templates), x), exact=x.exact)


def scramble(w: Writer) -> Value | None:
    """A reshape that puts elements elsewhere, and comes back to the shape it had."""
    x = w.any(lambda v: v.floats and v.rank > 1)
    if x is None:
        return None
    templates = [t for t in (*_MATRIX, *_CUBE) if "reshape({x}.shape)" in t or "view({x}.shape)" in t]
    if x.rank < 3:
        templates = [t for t in templates if "{p}" not in t]
    return w.line(_filled(w, w.pick(templates), x), exact=x.exact)


def same(w: Writer, x: Value) -> Value | None:
    """A variable itself, or a view or copy that looks like it."""
    return w.line(w.pick(_SAME).format(x=x), exact=x.exact)


def _filled(w: Writer, template: str, x: Value) -> str:
    i, j = (w.random.sample(range(x.rank), 2)) if x.rank > 1 else (0, 0)
    if w.chance(30):
        i -= x.rank
    order = w.random.sample(range(x.rank), x.rank)
    low, high = sorted(w.random.sample(range(x.rank), 2)) if x.rank > 1 else (0, 0)
    return template.format(
        x=x, i=i, j=j, k=w.pick((1, 2, 3)), n=w.size(), m=w.size(), p=str(order)[1:-1], low=low, high=high
    )


def join(w: Writer) -> Value | None:
    """A cat or stack of two or three variables whose shapes allow it."""
    x = w.any(lambda v: v.floats and v.rank > 0)
    if x is None:
        return None
    if w.chance(50):
        alike = [v for v in w.values if v.sample.dtype is x.sample.dtype and v.shape == x.shape]
        found = [x, *(w.pick(alike) for _ in range(w.pick((1, 1, 2))))]
        kind = w.pick(("cat", "stack"))
        dim = w.random.randrange(-1, x.rank)
    else:
        dim = w.random.randrange(x.rank)
        fitting = [v for v in w.values if v.sample.dtype is x.sample.dtype and _joinable(v, x, dim)]
        found = [x, *(w.pick(fitting) for _ in range(w.pick((1, 1, 2))))]
        kind, dim = "cat", dim if w.chance(50) else dim - x.rank
    w.random.shuffle(found)
    return w.line(f"torch.{kind}([{', '.join(map(str, found))}], {dim})", exact=all(v.exact for v in found))


def _joinable(a: Value, b: Value, dim: int) -> bool:
    return a.rank == b.rank and all(a.shape[i] == b.shape[i] for i in range(a.rank) if i != dim)


def parts(w: Writer) -> Value | None:
    """split, chunk, unbind: several variables at once."""
    x = w.any(lambda v: v.floats and v.rank > 1 and v.shape[-1] > 1)
    if x is None:
        return None
    ways = ["{x}.chunk(2, -1)", "{x}.split(1, -1)", "torch.tensor_split({x}, 2, -1)", "{x}.split([1, {rest}], -1)"]
    if x.shape[1] <= 8:
        ways += ["{x}.unbind(1)", "[t.squeeze(1) for t in {x}.split(1, 1)]", "{x}.chunk(2, 1)"]
    found = w.unpacked(w.pick(ways).format(x=x, rest=x.shape[-1] - 1), exact=x.exact)
    return found[-1] if found else None
