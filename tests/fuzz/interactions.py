"""Interactions of fields and of positions: FM, dots, CIN, bilinear pairs, attention of every kind."""

from __future__ import annotations

from tests.fuzz.writer import Value, Writer


def fields(w: Writer) -> Value | None:
    """A product over fields [B, F, D]."""
    x = w.cube(fields=True)
    count, dim = x.shape[1], x.shape[2]
    if count > 8 or dim > 16:
        return None
    ways = [
        "0.5 * ({x}.sum(1).pow(2) - {x}.pow(2).sum(1))",
        "0.5 * ({x}.sum(1) ** 2 - ({x} ** 2).sum(1)).sum(1, keepdim=True)",
        "torch.square(torch.sum({x}, dim=1)) - torch.sum({x} * {x}, dim=1)",
        "torch.bmm({x}, {x}.transpose(1, 2))",
        "torch.bmm({x}, {x}.transpose(1, 2))[:, *torch.tril_indices({f}, {f}, -1)]",
        "torch.matmul({x}, {x}.mT)[:, torch.triu_indices({f}, {f}, 1)[0], torch.triu_indices({f}, {f}, 1)[1]]",
        "torch.bmm({x}, {x}.mT).flatten(1)",
        "({x}[:, {rows}] * {x}[:, {cols}]).sum(-1)",
        "{x}[:, {rows}] * {x}[:, {cols}]",
        "torch.einsum('bid,bjd->bij', {x}, {x})",
        "torch.stack([({x}[:, i] * {x}[:, j]).sum(-1) for i in range({f}) for j in range(i + 1, {f})], 1)",
        "torch.cat([{x}[:, i] * {x}[:, j] for i in range({f}) for j in range(i)], 1)",
        "torch.stack([{x}[:, i] * {l}({x}[:, j]) for i in range({f}) for j in range(i + 1, {f})], 1)",
        "torch.cat([{l}({x}[:, i]) * {x}[:, j] for i in range({f}) for j in range(i + 1, {f})], -1)",
        "({l}({x}[:, {rows}]) * {x}[:, {cols}]).sum(-1)",
        "{x} * torch.sigmoid({x}.mean(-1) @ {s}).unsqueeze(-1)",
        "{x} * torch.relu({x}.amax(-1) @ {s})[..., None]",
        "torch.einsum('bhd,bmd->bhmd', {x}, {x}).flatten(1, 2)",
        "({x}.unsqueeze(2) * {x}.unsqueeze(1)).reshape({x}.shape[0], -1, {d})",
        "F.conv1d(({x}.unsqueeze(2) * {x}.unsqueeze(1)).flatten(1, 2), {c})",
        "torch.relu(F.conv1d(torch.einsum('bhd,bmd->bhmd', {x}, {x}).flatten(1, 2), {c})).sum(-1)",
    ]
    template = w.pick(ways)
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)] or [(0, 0)]
    filled = {
        "x": x,
        "f": count,
        "d": dim,
        "rows": [i for i, _ in pairs],
        "cols": [j for _, j in pairs],
        "l": w.state("l", f"nn.Linear({dim}, {dim}, bias=False)") if "{l}" in template else "",
        "s": w.parameter(count, count) if "{s}" in template else "",
        "c": w.parameter(w.size(), count * count, 1) if "{c}" in template else "",
    }
    return w.line(template.format(**filled))


def attention(w: Writer) -> Value | None:
    """Self-attention over [B, n, D], by hand, by heads, or torch's own."""
    x = w.cube()
    dim = x.shape[2]
    if dim > 16 or x.shape[1] > 32:
        return None
    kind = w.pick(("plain", "plain", "hand", "hand", "heads", "heads", "sdpa", "module", "layer"))
    if kind == "module" and w.dtype is not None:
        heads = w.pick([h for h in (1, 2, 4) if dim % h == 0])
        name = w.state("attention", f"nn.MultiheadAttention({dim}, {heads}, batch_first={w.chance(70)})")
        mask = f", key_padding_mask={w.mask(('B', _count(w, x)))}" if w.chance(20) else ""
        return w.line(f"{name}({x}, {x}, {x}{mask}{', need_weights=False' if w.chance(50) else ''})[0]")
    if kind == "layer":
        heads = w.pick([h for h in (1, 2) if dim % h == 0])
        options = f"{dim}, {heads}, {w.size()}, dropout=0.0, batch_first=True, norm_first={w.chance(50)}"
        return w.line(f"{w.state('layer', f'nn.TransformerEncoderLayer({options})')}({x})")
    if kind == "plain":
        ways = (
            "torch.softmax({x} @ {x}.mT, -1) @ {x}",
            "torch.softmax(torch.bmm({x}, {x}.transpose(1, 2)) / {s}, dim=-1).bmm({x})",
            "torch.softmax({x}.mT @ {x}, -1) @ {x}.mT",
            "({x} * torch.softmax({x}.sum(-1), 1).unsqueeze(-1)).sum(1)",
            "({x} * torch.softmax({x} @ {v}, 1).unsqueeze(-1)).sum(1)",
            "torch.einsum('bl,bld->bd', torch.softmax({x} @ {v}, -1), {x})",
        )
        return w.line(w.pick(ways).format(x=x, s=dim**0.5, v=w.parameter(dim)))
    names = [w.state("l", f"nn.Linear({dim}, {dim}, bias={w.chance(50)})") for _ in range(3)]
    q, k, v = (w.line(f"{name}({x})") for name in names)
    if kind == "sdpa":
        return w.line(f"F.scaled_dot_product_attention({q}, {k}, {v})")
    if kind == "hand":
        scores = w.line(f"{q} @ {k}.transpose(1, 2) / {dim**0.5}")
        if w.chance(40):
            mask = w.mask(("B", _count(w, x)))
            scores = w.line(f"{scores}.masked_fill({mask}.unsqueeze(1), -1e4)")
        if w.chance(20):
            edited = w.pick((scores, v))
            w.do(w.pick(("{x}[:, 0] = 0", "{x}.diagonal(dim1=1, dim2=2).fill_(-1)", "{x} *= 0.5")).format(x=edited))
        if w.chance(60):
            return w.line(f"torch.softmax({scores}, -1) @ {v}")
        weights = w.line(f"torch.softmax({scores}, -1)")
        w.line(w.pick(("{p}.mT", "{p} * 2", "{p}.log()", "{p}.amax(-1)", "{p}.mT @ {x}")).format(p=weights, x=x))
        return w.line(f"{weights} @ {w.line(w.pick(('{v}.relu()', '{v} * 2', '{v} + {x}')).format(v=v, x=x))}")
    heads = w.pick([h for h in (1, 2, 4) if dim % h == 0])
    ways = (
        "{t}.reshape({t}.shape[0], -1, {h}, {e}).transpose(1, 2)",
        "{t}.view({t}.size(0), {t}.size(1), {h}, -1).permute(0, 2, 1, 3)",
        "{t}.unflatten(-1, ({h}, {e})).transpose(1, 2)",
        "torch.stack({t}.split({e}, -1), 1)",
        "{t}.reshape({t}.shape[0], {h}, -1, {e})",  # scrambles
    )
    way = w.pick(ways)
    q, k, v = (w.line(way.format(t=t, h=heads, e=dim // heads)) for t in (q, k, v))
    mixed = w.line(f"torch.softmax({q} @ {k}.mT * {max(dim // heads, 1) ** -0.5}, -1) @ {v}")
    back = ("{m}.transpose(1, 2).flatten(2)", "{m}.transpose(1, 2).reshape({x}.shape)", "{m}.sum(2)")
    return mixed and w.line(w.pick(back).format(m=mixed, x=x))


def target(w: Writer) -> Value | None:
    """Target attention: one row against a sequence [B, n, D] (DIN), with its own little network."""
    x = w.cube()
    dim = x.shape[2]
    if dim > 16:
        return None
    alike = w.any(lambda v: v.floats and v.rank == 2 and v.shape == (x.shape[0], dim))
    q = alike or w.given(("B", dim))
    wide = w.line(f"{q}.unsqueeze(1).expand(-1, {x}.shape[1], -1)") if w.chance(60) else None
    wide = wide or w.line(f"{q}[:, None].expand_as({x})")
    if wide is None:
        return None
    joined = w.line(
        w.pick(
            (
                f"torch.cat([{wide}, {x}, {wide} - {x}, {wide} * {x}], -1)",
                f"torch.cat([{x}, {wide}], dim=-1)",
                f"torch.cat([{wide}, {x}, {wide} * {x}], 2)",
            )
        )
    )
    if joined is None:
        return None
    hidden, act = w.size(), w.pick(("nn.Sigmoid()", "nn.PReLU()", "nn.ReLU()", "nn.Tanh()"))
    net = f"nn.Sequential(nn.Linear({joined.shape[-1]}, {hidden}), {act}, nn.Linear({hidden}, 1))"
    scores = w.line(f"{w.state('net', net)}({joined}).squeeze(-1)")
    if scores is None:
        return None
    if w.chance(60):
        mask = w.line(
            f"torch.arange({x}.shape[1])[None] < {w.lengths()}[:, None]"
            if w.chance(50)
            else f"{w.mask(('B', _count(w, x)))}"
        )
        way = w.pick(("{s} * {m}", "{s}.masked_fill(~{m}, -1e4)", "torch.where({m}, {s}, torch.zeros_like({s}))"))
        scores = w.line(way.format(s=scores, m=mask)) or scores
    if w.chance(50):
        scores = w.line(f"torch.softmax({scores}, -1)") or scores
    ways = (
        "({s}.unsqueeze(-1) * {x}).sum(1)",
        "torch.bmm({s}.unsqueeze(1), {x}).squeeze(1)",
        "torch.einsum('bl,bld->bd', {s}, {x})",
        "({s}.unsqueeze(1) @ {x})[:, 0]",
    )
    return w.line(w.pick(ways).format(s=scores, x=x))


def _count(w: Writer, x: Value) -> str:
    return "L" if x.shape[1] == w.sample.L else str(x.shape[1])
