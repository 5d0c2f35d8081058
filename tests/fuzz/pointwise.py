"""Elementwise statements, and those over one or more axes: activations, masks, broadcasts, reductions, norms."""

from __future__ import annotations

from tests.fuzz.writer import Value, Writer

ACTIVATIONS = (
    "torch.relu({x})",
    "F.relu({x})",
    "F.relu6({x})",
    "F.hardtanh({x})",
    "F.hardtanh({x}, -0.5, 0.5)",
    "torch.sigmoid({x})",
    "torch.tanh({x})",
    "F.silu({x})",
    "F.gelu({x})",
    "F.gelu({x}, approximate='tanh')",
    "F.leaky_relu({x}, 0.1)",
    "F.elu({x})",
    "F.softplus({x})",
    "F.hardsigmoid({x})",
    "F.hardswish({x})",
    "F.mish({x})",
    "{x} * torch.sigmoid({x})",
    "{x}.clamp(min=0)",
    "{x}.clamp(max=0.5)",
    "{x}.clamp(-1, 1)",
)
_UNARY = (
    *ACTIVATIONS,
    "-{x}",
    "{x}.abs()",
    "{x}.square()",
    "{x} ** 2",
    "{x} * {x}",
    "{x} + {x}",
    "{x} - {x}",
    "1 - {x}",
    "{x} * 2",
    "{x} / 3",
    "{x} + 0",
    "{x} * 1",
    "{x} * 0.5 + 1",
    "2 / ({x}.abs() + 1)",
    "torch.exp({x}.clamp(max=3))",
    "torch.exp(-{x}.abs())",
    "torch.log1p({x}.abs())",
    "torch.sqrt({x}.abs() + 1e-3)",
    "torch.rsqrt({x}.square() + 1)",
    "torch.erf({x})",
    "torch.sin({x})",
    "torch.sign({x}) * torch.log1p({x}.abs())",
    "F.dropout({x}, 0.5, False)",
    "{x}.nan_to_num()",
    "{x}.float()",
    "{x}.to(torch.float64).to({x}.dtype)",
    "{x}.round()",
    "{x} * torch.ones_like({x})",
    "{x} + torch.zeros_like({x})",
    "{x} * {x}.shape[0]",
    "{x} / max({x}.shape[0], 1)",
    "{x} / {x}.shape[-1] ** 0.5",
    "torch.where({x} > 0, {x}, {x} * 0.1)",
    "torch.where({x} > 0, {x}, torch.zeros_like({x}))",
    "{x}.masked_fill({x} < 0, 0)",
    "{x}.masked_fill({x} == 0, -1)",
    "({x} > 0) * {x}",
    "({x} != 0).to({x}.dtype)",
    "torch.max({x}, torch.zeros_like({x}))",
)
_BINARY = (
    "{x} + {y}",
    "{x} + {y}",
    "{x} * {y}",
    "{x} * {y}",
    "{x} - {y}",
    "{x} / ({y}.abs() + 1)",
    "torch.maximum({x}, {y})",
    "torch.minimum({x}, {y})",
    "torch.where({x} > {y}, {x}, {y})",
    "torch.where({y} > 0, {x}, -{x})",
    "{x}.masked_fill({y} > 0, 0)",
    "{x}.masked_fill({y} > 0, -1e4)",
    "torch.addcmul({x}, {x}, {y})",
    "torch.lerp({x}, {y}, 0.3)",
    "torch.add({x}, {y}, alpha=0.5)",
    "{x} * torch.sigmoid({y})",
    "torch.sigmoid({x}) * {y} + (1 - torch.sigmoid({x})) * {x}",
    "torch.relu({x} + {y})",
    "{x} * ({y} > 0)",
)
_OVER = (
    "{x}.sum({i})",
    "{x}.sum({i})",
    "{x}.mean({i})",
    "{x}.mean({i}, keepdim=True)",
    "{x}.sum({i}, keepdim=True)",
    "{x}.amax({i})",
    "{x}.amin({i}, keepdim=True)",
    "{x}.max({i}).values",
    "{x}.max({i}, keepdim=True)[0]",
    "{x}.min({i})[0]",
    "{x}.var({i}, unbiased=False)",
    "{x}.std({i}, correction=0, keepdim=True)",
    "{x}.norm(dim={i})",
    "{x}.norm(2, {i}, keepdim=True)",
    "torch.linalg.vector_norm({x}, dim={i})",
    "{x}.logsumexp({i})",
    "{x}.prod({i})",
    "{x}.cumsum({i})",
    "{x}.argmax({i})",
    "({x} > 0).sum({i})",
    "({x} > 0).any({i})",
    "({x} > 0).float().mean({i})",
    "{x} - {x}.mean({i}, keepdim=True)",
    "{x} / ({x}.abs().sum({i}, keepdim=True) + 1)",
)
_ALONG = (
    "torch.softmax({x}, {i})",
    "torch.softmax({x}, {i})",
    "F.softmax({x}, dim={i})",
    "F.log_softmax({x}, {i})",
    "F.softmax({x} / 0.5, {i})",
    "F.normalize({x}, dim={i})",
    "F.normalize({x}, p=1, dim={i})",
    "({x} - {x}.mean({i}, keepdim=True)) / ({x}.var({i}, keepdim=True, unbiased=False) + 1e-3).sqrt()",
    "{x} * torch.rsqrt({x}.pow(2).mean({i}, keepdim=True) + 1e-3)",
    "F.layer_norm({x}, {x}.shape[-1:])",
    "torch.exp({x} - {x}.amax({i}, keepdim=True))",
)
_LIFTS = ("{y}.unsqueeze({i})", "{y}[:, None]", "{y}[..., None]", "{y}.unsqueeze(1)", "{y}.mT", "{y}")


def unary(w: Writer) -> Value | None:
    return w.line(w.pick(_UNARY).format(x=w.float()))


def binary(w: Writer) -> Value | None:
    """Two variables; the second one lifted so that it broadcasts, or whatever eager makes of it."""
    x, template = w.float(), w.pick(_BINARY)
    for _ in range(4):
        y = w.any(lambda v: v.floats and v.sample.dtype is w.dtype)
        if y is None:
            return None
        lifted = w.pick(_LIFTS).format(y=y, i=w.random.randrange(y.rank + 1)) if y.shape != x.shape else str(y)
        pair = (str(x), lifted) if w.chance(70) else (lifted, str(x))
        found = w.line(template.format(x=pair[0], y=pair[1]))
        if found is not None:
            return found
    return None


def scaled(w: Writer) -> Value | None:
    """A variable and one of its own parts or reductions, broadcast back."""
    x = w.float(w.pick((2, 2, 3, None)))
    if not x.rank:
        return None
    i = w.random.randrange(x.rank)
    ways = (
        f"{x}[{x}.shape[0] - 1:]",
        f"{x}[:1]",
        f"{x}[-1:]",
        f"{x}.select({i}, 0).unsqueeze({i})",
        f"{x}.narrow({i}, 0, 1)",
        f"{x}.mean({i}, keepdim=True)",
        f"{x}.amax({i}, keepdim=True)",
        f"{x}.sum({i}, keepdim=True)",
        w.parameter(*x.shape[-1:]) if x.shape[-1] < 9 else f"{x}",
        w.parameter(1) if w.chance(30) else f"{x}",
        f"{x}.flip({i})",
        f"{x}.roll(1, {i})",
    )
    return w.line(w.pick(_BINARY).format(x=x, y=w.pick(ways)))


def program(w: Writer) -> Value | None:
    """A run of elementwise steps, in one line or several."""
    x, found = w.float(), None
    for _ in range(w.pick((2, 3, 4))):
        found = w.line(w.pick(_UNARY).format(x=x)) if w.chance(60) else binary(w)
        x = found or x
    return found


def reduction(w: Writer) -> Value | None:
    x = w.float(w.pick((2, 3, 3, None)))
    return x.rank and w.line(w.pick(_OVER).format(x=x, i=_axes(w, x)))


def along(w: Writer) -> Value | None:
    x = w.float(w.pick((2, 3, 3, None)))
    return x.rank and w.line(w.pick(_ALONG).format(x=x, i=w.random.randrange(-x.rank, x.rank)))


def _axes(w: Writer, x: Value) -> str:
    if w.chance(80):
        return str(w.random.randrange(-x.rank, x.rank))
    axes = w.random.sample(range(x.rank), w.random.randrange(1, x.rank + 1))
    return f"({', '.join(map(str, axes))},)"


def masked(w: Writer) -> Value | None:
    """A mask from lengths, ids or an input, over a variable [B, n, ...]."""
    x = w.cube() if w.chance(70) else w.rows()
    n = "L" if x.shape[1] == w.sample.L else str(x.shape[1])
    ways = [
        lambda: str(w.mask(("B", n))),
        lambda: str(w.mask(("B", n))),
        lambda: f"torch.arange({x}.shape[1]) < {w.lengths()}[:, None]",
        lambda: f"torch.arange({x}.shape[1])[None, :] < {w.lengths()}.unsqueeze(1)",
        lambda: f"{w.ids(('B', n), 4)} != 0",
        lambda: f"{x}.detach()[..., 0] > 0" if x.rank == 3 else f"{x} > 0",
    ]
    mask = w.line(w.pick(ways)())
    if mask is None:
        return None
    lifted = f"{mask}.unsqueeze(-1)" if x.rank == 3 else str(mask)
    templates = (
        "{x} * {m}",
        "{x} * {m}.to({x}.dtype)",
        "{x}.masked_fill(~{m}, 0)",
        "{x}.masked_fill({m} == 0, -1e4)",
        "torch.where({m}, {x}, torch.zeros_like({x}))",
        "torch.where({m}, {x}, 0.0)",
        "({x} * {m}).sum(1)",
        "({x} * {m}).sum(1) / {m}.sum(1).clamp(min=1)",
        "({x} * {m}).sum(1) / ({m}.sum(1) + 1e-8)",
        "{x}.masked_fill(~{m}, -1e9).softmax(1)",
        "{x}.masked_fill(~{m}, float('-inf')).softmax(1).nan_to_num()",
        "({x} - (1 - {m}.to({x}.dtype)) * 1e4).amax(1)",
    )
    return w.line(w.pick(templates).format(x=x, m=lifted))
