"""Random small models of views, copies and in-place edits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Env = list[Tensor]
Step = Callable[["Program", Env, Tensor], None]

WIDTH = 4
# What turns a tensor of one form into another. Forms: [B, 4], [B, 2], [4 * B], [4, B], [B, 1, 4].
VIEWS: dict[tuple[str, str], tuple[Callable[[Tensor], Tensor], ...]] = {
    ("rows", "rows"): (
        lambda x: x[:],
        lambda x: x.view(-1, WIDTH),
        lambda x: x.contiguous(),
        lambda x: x.float(),
        lambda x: x.expand(-1, WIDTH),
        lambda x: x.transpose(0, 1).transpose(1, 0),
        lambda x: torch.dropout(x, 0.5, False),
        lambda x: x.reshape(x.shape[0], WIDTH),
        lambda x: torch.einsum("bd->bd", x),
        lambda x: x.detach(),
        lambda x: x.clone(),
        lambda x: torch.cat([x]),
        lambda x: torch.cat([torch.tensor([]), x], 1),
        lambda x: torch.cat([x[:, :1], torch.tensor([]), x[:, 1:]], 1),
        lambda x: x.repeat(1, 1),
    ),
    ("rows", "part"): (lambda x: x[:, 1:3], lambda x: x.split(2, 1)[0], lambda x: x.narrow(1, 0, 2)),
    ("rows", "flat"): (lambda x: x.reshape(-1), lambda x: x.flatten()),
    ("flat", "rows"): (lambda x: x.view(-1, WIDTH), lambda x: x.reshape(-1, WIDTH)),
    ("rows", "columns"): (lambda x: x.t(), lambda x: x.permute(1, 0), lambda x: torch.einsum("bd->db", x)),
    ("columns", "rows"): (lambda x: x.t(), lambda x: x.transpose(0, 1).contiguous()),
    ("rows", "middle"): (lambda x: x.unsqueeze(1), lambda x: x[:, None]),
    ("middle", "rows"): (lambda x: x.squeeze(1), lambda x: x[:, 0], lambda x: x.flatten(1)),
    ("part", "part"): (lambda x: x * 1, lambda x: x.contiguous(), lambda x: x.clone()),
}
UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.relu,
    lambda x: x * 2,
    lambda x: x + 1,
    lambda x: torch.where(x > 0, x, -x),
    torch.zeros_like,
)
BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (torch.add, torch.mul, torch.sub, torch.maximum)
EDITS: tuple[Callable[[Tensor], object], ...] = (
    Tensor.relu_,
    lambda x: x.add_(1),
    lambda x: x.mul_(2),
    lambda x: x.clamp_(-1, 3),
    lambda x: x.masked_fill_(x > 2, 0.5),
    lambda x: x.fill_(3),
    lambda x: x.zero_(),
    lambda x: x.neg_(),
    lambda x: x.__setitem__(slice(None), 2),
    lambda x: x.__setitem__(x > 1, 1.5),
    lambda x: x[..., :1].add_(1),
    lambda x: x[..., 1:].copy_(x[..., 1:] * 2),
    lambda x: torch.dropout_(x, 0.5, False),
    lambda x: x.detach_(),
    lambda x: x.unsqueeze_(0).squeeze_(0),
)
BINARY_EDITS: tuple[Callable[[Tensor, Tensor], object], ...] = (
    Tensor.add_,
    Tensor.sub_,
    Tensor.mul_,
    Tensor.copy_,
    lambda x, y: x.add_(y.clone(), alpha=2),
)


@dataclass(frozen=True)
class Line:
    """values[target] of `form`: a new value, or (edit) a change of an old one."""

    form: str
    call: Callable[..., object]
    operands: tuple[int, ...]
    edit: bool = False


class Program(nn.Module):
    """forward(x [B, 4], ids [B]) by the lines of a random program; values 0, 1, 2 are x, rows of a table, a product."""

    def __init__(self, seed: int, length: int = 9) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randint(-3, 4, (6, WIDTH)).float())
        rng = random.Random(seed)
        self.lines: list[Line] = []
        self.forms = ["rows", "rows", "rows"]
        for _ in range(length):
            self._grow(rng)
        self.outputs = [rng.randrange(len(self.forms)) for _ in range(rng.randint(1, 3))]

    def _grow(self, rng: random.Random) -> None:
        kind = rng.choice(("view", "view", "unary", "binary", "edit", "edit", "edit both"))
        first = rng.randrange(len(self.forms))
        form = self.forms[first]
        like = [number for number, other in enumerate(self.forms) if other == form]
        second = rng.choice(like)
        if kind == "view":
            source, target = rng.choice([pair for pair in VIEWS if pair[0] == form])
            self._add(Line(target, rng.choice(VIEWS[source, target]), (first,)))
        elif kind == "unary":
            self._add(Line(form, rng.choice(UNARY), (first,)))
        elif kind == "binary":
            self._add(Line(form, rng.choice(BINARY), (first, second)))
        elif kind == "edit":
            self._add(Line(form, rng.choice(EDITS), (first,), edit=True))
        else:
            self._add(Line(form, rng.choice(BINARY_EDITS), (first, second), edit=True))

    def _add(self, line: Line) -> None:
        self.lines.append(line)
        if not line.edit:
            self.forms.append(line.form)

    def forward(self, x: Tensor, ids: Tensor) -> list[Tensor]:
        rows = torch.nn.functional.embedding(ids, self.table)
        values: Env = [x, rows, rows * x]
        for line in self.lines:
            result = line.call(*(values[number] for number in line.operands))
            if not line.edit:
                assert isinstance(result, Tensor)
                values.append(result)
        return [values[number] for number in self.outputs]


def inputs(batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Whole numbers, so that sums and products are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (batch, WIDTH), generator=generator).float()
    return x, torch.randint(0, 6, (batch,), generator=generator)
