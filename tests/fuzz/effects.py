"""Statements with effects: edits in place, buffers that are updated, weights that are edited, attributes."""

from __future__ import annotations

import re

from tests.fuzz.writer import Value, Writer

_ITSELF = re.compile(r"\.contiguous\(|ropout\(")  # may return its argument, which a capture does not tell Python
_EDITS = (
    "{x}.add_(1)",
    "{x}.mul_(0.5)",
    "{x}.relu_()",
    "{x}.clamp_(-1, 1)",
    "{x}.sigmoid_()",
    "{x}.zero_()",
    "{x}[0] = 0",
    "{x}[:, 0] = 1",
    "{x}[:, :1] += 1",
    "{x}[..., -1] *= 2",
    "{x}[{x} < 0] = 0",
    "{x}.masked_fill_({x} > 1, 1)",
    "{x}.copy_({x}.flip(0))",
    "{x}.unsqueeze(0).add_(1)",
    "{x}.view(-1)[:1] = 3",
    "{x}.transpose(0, -1).mul_(2)",
    "{x}.detach().mul_(0.5)",
    "{x}.select(0, 0).fill_(2)",
    "torch.broadcast_tensors({x}, {x}[:1])[0].mul_(0.9)",
    "torch.atleast_3d({x}, {x})[1].add_(1)",
    "torch.unsafe_chunk({x}, 2)[0].mul_(0.5)",
    "{x}.sub_({x}.mean())",
    "F.relu({x}, inplace=True)",
    "{x} += 1",
    "{x} *= {x}",
)
_WEIGHTS = (
    "{w}.data.clamp_(min=0)",
    "{w}.data.mul_(0.9)",
    "{w}.detach().mul_(0.9)",
    "{w}.data[0].zero_()",
    "{w}.data.copy_({w}.data * 0.5)",
    "{w}.data.view(-1)[:1] = 0.5",
    "with torch.no_grad():\n    {w}.mul_(0.9)",
    "with torch.no_grad():\n    {w}[0] = 0",
    "with torch.no_grad():\n    {w}.clamp_(-0.5, 0.5)",
    "{w}.data.t().mul_(0.5)",
)
_STATE = (
    "{b} += 1",
    "{b} = {b} + 1",
    "{b}.add_(1)",
    "{b}.mul_(0.9).add_({x}.detach().mean() * 0.1)",
    "{b} = {b} * 0.9 + {x}.detach().mean() * 0.1",
    "{b}.copy_({b} * 0.5)",
    "{b}.lerp_({x}.detach().mean(), 0.1)",
    "{b}[0] += 1",
    "torch.broadcast_tensors({b}, {b}[:1])[0].mul_(0.9)",
    "torch.meshgrid({b}, {x}.detach().reshape(-1)[:1], indexing='ij')[0].add_(1)",
    "{b} = torch.maximum({b}, {x}.detach().amax())",
)
_CHECKS = (
    "assert ({x} > -2.5).all()",
    "assert not {x}.isnan().any(), f'NaN in {{len({x})}}'",
    "assert torch.isfinite({x}).all() and ({x} < 3).all()",
    "if ({x} < -1.5).any():\n    raise ValueError('small')",
    "if not ({x}.abs() < 4).all() or {x}.shape[0] == 9:\n    raise RuntimeError('far')",
    "if {x}.sum().item() > 5:\n    raise ValueError('much')",
    "if {x}.amax() > 2.5: raise ValueError('large')",
    "for row in {x}[:2]:\n    if row.sum() < -4: raise ValueError('little')",
)


def edit(w: Writer) -> Value | None:
    """An edit of a variable, which may be a view of another one or an input."""
    made = [v for v in w.values if v.floats and v.rank and v.name.startswith("v")]
    x = w.pick(made[-4:]) if made and w.chance(85) else w.float()
    if not w.do(w.pick(_EDITS).format(x=x)):
        return None
    return x


def weight(w: Writer) -> Value | None:
    """An edit of a weight, in front of the layer or lookup that reads it, or behind."""
    names = [n for n, _ in w.module.named_parameters() if "." not in n or re.fullmatch(r"\w+\.weight", n)]
    if not names:
        return None
    w.do(w.pick(_WEIGHTS).format(w=f"self.{w.pick(names)}"))
    layers = [n for n, m in w.module.named_children() if type(m).__name__ == "Linear"]
    if layers and w.chance(60):
        name = w.pick(layers)
        n = getattr(w.module, name).in_features
        x = w.any(lambda v: v.floats and v.rank == 2 and v.shape[-1] == n)
        return x and w.line(f"self.{name}({x})")
    return None


def counted(w: Writer) -> Value | None:
    """A buffer or an attribute that the call updates and may read."""
    x = w.float()
    kind = w.pick(("buffer", "buffer", "number", "kept"))
    if kind == "kept":
        w.do(f"self.{w.fresh('kept')} = {x}.detach()")
        return None
    if kind == "number":
        name = w.state("steps", "0")
        w.do(f"{name} = {name} + 1")
        return w.line(f"{x} * {name}") if w.chance(50) else None
    made = w.pick(("torch.zeros(1)", "torch.ones(1)", f"torch.ones({w.width})"))
    buffer = w.buffer(made)
    w.do(w.pick(_STATE).format(b=buffer, x=x))
    if w.chance(60):
        return w.line(w.pick(("{x} - {b}", "{x} * {b}", "{x} / ({b} + 1)")).format(x=x, b=buffer))
    return None


def checked(w: Writer) -> Value | None:
    """A check of data, which raises for some."""
    w.do(w.pick(_CHECKS).format(x=w.float()))
    return None


def asked(w: Writer) -> Value | None:
    """Python that asks about sizes, flags or data, and branches."""
    x = w.float()
    ways = (
        "{x} * 2 if {x}.shape[0] > 1 else {x}",
        "{x} if {x}.shape[0] == {x}.shape[-1] else -{x}",
        "{x} + 1 if self.training else {x}",
        "{x} + 1 if {x}.requires_grad else {x} * 3",
        "{x} * len({x})",
        "{x}.sum() if {x}.numel() else {x}.new_zeros(())",
        "{x} + {x}.shape[0] % 2",
        "{x} * ({x}.shape[0] // 2)",
        "{x} if {x}.is_contiguous() else {x} * 2",
        "{x} if {x}.stride(-1) == 1 else {x} * 2",
        "{x} if {x}.stride(0) == 1 else {x} * 2",
        "{x} if {x}.stride() == {y}.stride() else {x} * 2",
        "{x} if max({x}.stride()) > {x}.shape[-1] else {x} * 2",
        "{x} if {x}.transpose(0, -1).is_contiguous() else {x} * 2",
        "{x} if {x} is {y} else {x} * 2",
        "{x} if {x}.shape == {y}.shape else {x} * 2",
        "{x} if {x}.numel() > 8 else {x} * 2",
        "{x} * 2 if ({x} > 0).any() else {x}",
        "{x} * 2 if {x}.mean().item() > 0.1 else {x} - 1",
        "{x} if {x}.isfinite().all() and {x}.sum() < 3 else torch.nan_to_num({x}) / 3",
        "{x} / 2 if {x}.numel() and {x}.max() > {y}.mean().item() else {x}",
        "{x} + {x}[{x} > 1].sum() if ({x} > 1).any() else {x}",
        "{x} if {x}.dim() > 2 else {x} + 0.5",
        "{x} + float({x}.shape[0] == 4)",
    )
    way, y = w.pick(ways), w.float()
    if " is " in way and any(map(_ITSELF.search, w.setup + w.lines)):
        return None  # a known limit
    return w.line(way.format(x=x, y=y))
