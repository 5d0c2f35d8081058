"""Statements that index, order, scatter, and whose sizes depend on data."""

from __future__ import annotations

from tests.fuzz.writer import Value, Writer

_ORDERED = (
    "{x}.topk({k}, {i}).values",
    "{x}.topk({k}, {i})[0]",
    "torch.topk({x}, {k}, dim={i}, largest=False).values",
    "{x}.topk({k}, {i}).indices",
    "{x}.sort({i}).values",
    "{x}.sort({i}, descending=True)[0]",
    "{x}.argsort({i})",
    "{x}.gather({i}, {x}.topk({k}, {i}).indices)",
    "{x}.gather({i}, {x}.argsort({i}))",
    "torch.take_along_dim({x}, {x}.argmax({i}, keepdim=True), {i})",
    "torch.zeros_like({x}).scatter({i}, {x}.topk({k}, {i}).indices, 1.0)",
    "{x}.masked_fill({x} < {x}.topk({k}, {i}).values.amin({i}, keepdim=True), 0)",
    "{x}.scatter_add({i}, {x}.argsort({i}), {x})",
    "{x}.kthvalue(1, {i}).values",
    "{x}.median({i}).values",
    "{x}.cummax({i}).values",
    "torch.softmax({x}.masked_fill({x} < {x}.topk({k}, {i}).values[..., -1:], -1e4), -1)",
)
_PICKED = (
    "{x}.index_select({i}, {ids})",
    "{x}[{ids}]",
    "{x}[:, {ids}]",
    "torch.index_select({x}, {i}, {ids})",
    "{x}.index_add({i}, {ids}, {x}.index_select({i}, {ids}))",
    "{x}[torch.arange({x}.shape[0]), {ids} % {x}.shape[1]]",
    "F.one_hot({ids}, {n}).to({x}.dtype)",
    "torch.zeros({n}, {x}.shape[-1], dtype={x}.dtype).index_add(0, {ids}, {x})",
    "torch.zeros({n}, {x}.shape[-1], dtype={x}.dtype).index_add_(0, {ids}, {x})",
    "torch.bincount({ids}, minlength={n}).to({x}.dtype)",
)
_SIZED = (
    "{x}[{m}]",
    "{x}[{m}].sum(0)",
    "{x}[{m}].mean(0)",
    "{x}[{m}].expand_as({x}) + 0",
    "{x}[{m}] + {x}",
    "{x}[{m}] * 2 + 1",
    "torch.relu({x}[{m}])",
    "{x} - {x}[{m}].mean(0, keepdim=True)",
    "{x}[{m}] * {x}[:1]",
    "torch.cat([{x}[{m}], {x}[~{m}]])",
    "{x}[{m}.nonzero().squeeze(1)]",
    "{x}[{m}.nonzero()[:, 0]]",
    "{x}[torch.where({m})[0]]",
    "{x}.index_select(0, {m}.nonzero().view(-1))",
    "torch.masked_select({x}, {m}.view(-1, *[1] * ({x}.dim() - 1)))",
    "torch.masked_select({x}, {x} > 0).sum()",
    "{x}.repeat_interleave({m}.long(), 0)",
    "{x}.repeat_interleave({m}.long() + 1, dim=0)",
    "{x}[: {m}.sum()]",
    "{x}[: int({m}.sum())]",
    "torch.zeros_like({x}).masked_scatter({m}.view(-1, *[1] * ({x}.dim() - 1)), {x})",
    "torch.zeros_like({x}).index_put(({m}.nonzero()[:, 0],), {x}[{m}])",
    "torch.arange(int({m}.sum())).to({x}.dtype)",
    "F.softmax({x}[{m}], 0)",
    "{x}[{m}].reshape({x}.shape[0], -1)",
    "{x}[{m}].flatten(1) @ {x}[{m}].flatten(1).mT",
    "torch.unique({m}.long())",
)
_LENGTHS = (
    "torch.arange({l}.max())[None] < {l}[:, None]",
    "torch.arange(int({l}.max()))[None, :] < {l}.unsqueeze(1)",
    "torch.arange({l}.max().item()).unsqueeze(0) < {l}.unsqueeze(1)",
    "torch.repeat_interleave(torch.arange({l}.shape[0]), {l})",
    "torch.repeat_interleave({l})",
    "torch.unique({l})",
    "{l}.cumsum(0)",
    "torch.arange({l}.sum())",
)


def order(w: Writer) -> Value | None:
    x = w.float(w.pick((2, 2, 3)))
    i = w.random.randrange(x.rank)
    k = w.pick((1, 2, 3)) if x.shape[i] >= 3 else 1
    return w.line(w.pick(_ORDERED).format(x=x, i=w.pick((i, -1, 1)), k=k))


def index(w: Writer) -> Value | None:
    x, n = w.float(w.pick((2, 2, 3))), w.size()
    ids = w.any(lambda v: v.name.startswith("ids") and v.rank == 1)
    ids = ids or w.ids((w.pick(("B", 1, 3, w.size())),), min(n, 3) if w.chance(70) else n)
    return w.line(w.pick(_PICKED).format(x=x, ids=ids, n=n, i=w.random.randrange(x.rank)))


def sized(w: Writer) -> Value | None:
    """A size that depends on the data: rows that a mask picks, positions up to the longest."""
    if w.chance(30):
        lengths = w.lengths()
        found = w.line(w.pick(_LENGTHS).format(l=lengths))
        if found is None:
            return None
        if found.sample.dtype is not w.dtype and w.chance(50):
            x = w.any(lambda v: v.floats and v.rank == 3 and v.shape[1] == w.sample.L) or w.given(("B", "L", w.size()))
            ways = (
                "{x} * {f}.unsqueeze(-1)",
                "{x}[:, : {f}.shape[1]] * {f}[..., None]",
                "{x}.sum(-1) * {f}",
                "{x}[:, {f}]",
            )
            found = w.line(w.pick(ways).format(x=x, f=found)) or found
        return found
    x = w.float(w.pick((2, 2, 3)))
    if x.shape[0] != w.sample.B:
        return None
    known = w.any(lambda v: v.name.startswith("mask") and v.shape == (w.sample.B,))
    mask = known or (w.mask(("B",)) if w.chance(70) else w.line(f"{x}.flatten(1).sum(1) > 0"))
    return mask and w.line(w.pick(_SIZED).format(x=x, m=mask))
