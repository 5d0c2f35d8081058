"""Random graphs of views, copies and edits: what shares memory with what, who edits it, and who is handed it.

They are small and their inputs are of any strides, so that most views meet a size of 0 or 1, an edit, or the caller.
"""

from __future__ import annotations

import random

import torch

from tests.fuzz.dense import outputs_of
from tests.fuzz.programs import Program, Sizes
from tests.fuzz.writer import Writer

_INPUTS = (
    "torch.randn(B, {n})",
    "torch.randn({n}, B).t()",
    "torch.randn(B, {n} + 2)[:, 1:{n} + 1]",
    "torch.randn(B, 1)",
    "torch.randn(B, B)",
    "torch.randn(B, L)",
)
_VIEWS = (  # or a copy, as the strides want it
    "{x}.view({x}.shape)",
    "{x}.view_as({x})",
    "{x}.reshape({x}.shape)",
    "{x}.mT.reshape({x}.shape)",
    "{x}.reshape(-1)",
    "{x}.flatten()",
    "{x}.flatten(0)",
    "{x}.unflatten(-1, (-1, 1)).flatten(-2)",
    "torch.ravel({x})",
    "{x}.contiguous()",
    "{x}.t().contiguous().t()",
    "{x}.to({x}.dtype)",
    "{x}.type_as({x})",
    "{x}.float()",
    "{x}[:]",
    "{x}[...]",
    "{x}[:1]",
    "{x}[0:{x}.shape[0]]",
    "{x}[:, :{x}.shape[1]]",
    "{x}.narrow(0, 0, 1)",
    "{x}.select(-1, 0)",
    "{x}.diagonal()",
    "{x}.unfold(0, 1, 1).squeeze(-1)",
    "{x}.as_strided({x}.shape, {x}.stride())",
    "{x}.T",
    "{x}.transpose(0, 1)",
    "{x}.transpose(0, 1).transpose(0, 1)",
    "{x}.permute(1, 0)",
    "{x}.swapaxes(0, 1)",
    "{x}.movedim(0, 1)",
    "{x}.squeeze()",
    "{x}.squeeze(-1)",
    "torch.squeeze({x}, 1)",
    "{x}.unsqueeze(0).squeeze(0)",
    "torch.atleast_2d({x})",
    "{x}.expand({x}.shape)",
    "{x}.expand_as({x})",
    "torch.broadcast_tensors({x}, {x})[0]",
    "{x}.chunk(1, -1)[0]",
    "{x}.split(1, 0)[0]",
    "{x}.unbind(0)[0].unsqueeze(0)",
    "F.dropout({x}, 0.5, False)",
    "{x}.detach()",
    "{x}.data",
    "{x}.requires_grad_(False) if not {x}.requires_grad else {x}",
)
_COMPUTED = (
    "{x} * 1",
    "{x} / 1",
    "{x} + 0",
    "{x} * 2",
    "{x} + {y}",
    "{x} - {x}.mean()",
    "{x} @ {x}.T",
    "{x}.clone()",
    "{x}.relu()",
    "{x}.clamp(-1, 1)",
    "{x}.nan_to_num()",
    "{x}.abs().log1p()",
    "{x}.softmax(-1)",
    "{x}.cumsum(0)",
    "{x}.sum(0, keepdim=True)",
    "{x}.repeat(1, 1)",
    "{x}.masked_fill({x} > 9, 0)",
    "torch.where({x} > 0, {x}, {y})",
    "torch.maximum({x}, {y})",
    "torch.cat([{x}], 0)",
    "torch.stack([{x}, {x}])[0]",
    "torch.einsum('ij->ij', {x})",
    "torch.einsum('ij->ji', {x})",
    "torch.empty_like({x}).copy_({x})",
)
_EDITS = (
    "{x}.add_(1)",
    "{x}.mul_(0.5)",
    "{x} += {y}",
    "{x}[0] = 0",
    "{x}.relu_()",
    "{x}.clamp_(-1, 1)",
    "{x}.masked_fill_({x} > 0, 1)",
    "{x}.copy_({y})",
    "{x}.zero_()",
    "{x}.fill_(1)",
    "{x}.t().mul_(2)",
    "{x}.data.mul_(0.5)",
    "{x}.detach().add_(1)",
    "{x}.view(-1)[:1] = 3",
)
_SILENT = "with torch.no_grad():\n    "  # in front of a statement
_LATER = (Sizes(1, 1), Sizes(2, 3), Sizes(3, 2), Sizes(4, 1), Sizes(5, 5), Sizes(0, 2), Sizes(2, 0))


def program(seed: int, gradients: bool | None = None) -> Program:
    """The program of a seed. gradients: with them, without, or (None) some with and some without."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    n = r.choice((1, 2, 3))
    w = Writer(r, torch.float32, n)
    for _ in range(r.choice((1, 1, 2))):
        w.argument("x", w.pick(_INPUTS).format(n=n), grad=w.chance(50))
    for _ in range(r.choice((1, 2, 2, 3, 3, 4, 5))):
        _statement(w, n)
    outputs = outputs_of(w)
    return w.finish(
        outputs,
        seed % 5,
        grad=w.chance(50) if gradients is None else gradients,
        example=w.chance(75),
        captured=Sizes(r.choice((1, 2, 3, n)), r.choice((1, 2, 3, n)), 1.0),
        later=tuple(sorted(r.sample(_LATER, 2), key=lambda sizes: 0 in sizes[:2])),  # it may need its own capture
    )


def _statement(w: Writer, n: int) -> None:
    x, y, kind = w.float(), w.float(), w.random.randrange(100)
    silent = _SILENT if w.chance(15) else ""
    if kind < 16:
        w.do(silent + w.pick(_EDITS).format(x=x, y=y))
    elif kind < 96:
        w.block(f"{silent}{{v}} = {w.pick(_VIEWS if kind < 75 else _COMPUTED)}", x=x, y=y)
    else:
        w.line(f"{w.state('linear', f'nn.Linear({n}, {n})')}({x})")
