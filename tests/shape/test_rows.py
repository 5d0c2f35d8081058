"""Where the rows of a batch are, operator by operator: what is said to keep them is computed in pieces and compared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt.capture import capture
from fxopt.normalize import normalize
from fxopt.shape.placements import Rows
from fxopt.shape.rows import batch_symbol, rows_of

W, TABLE = torch.randn(3, 3), torch.randn(9, 2)


class Model(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        return self.function(x, i)


KEEP: dict[str, Callable[..., Tensor]] = {
    "pointwise": lambda x, i: x * 2 + x.sum(1, keepdim=True),
    "linear on the last dim": lambda x, i: F.linear(x, W),
    "a weight on the left": lambda x, i: torch.matmul(W, x.transpose(1, 2)),
    "pairs": lambda x, i: torch.bmm(x, x.transpose(1, 2)).flatten(1),
    "rows moved, and back": lambda x, i: (x.transpose(0, 1) + 1).transpose(0, 1).softmax(1),
    "flattened rows": lambda x, i: F.linear(x.reshape(-1, 3), W).view(-1, 4, 3),
    "flattened with sizes": lambda x, i: F.linear(x.reshape(x.shape[0] * 4, 3), W).view(x.shape[0], 12),
    "lookups": lambda x, i: F.embedding(i, TABLE).sum(1) + x[:, 0, :2],
    "pieces": lambda x, i: torch.cat([part.relu() for part in x.split(2, 1)], 2),
    "stack": lambda x, i: torch.stack([x[:, 0], x[:, 1]], 1).sum(2),
    "stack in front": lambda x, i: torch.stack([x, x + 1], 0).sum(0),
    "made by size": lambda x, i: x + x.new_ones(x.shape[0], 4, 3) * TABLE[:4, :1],
    "expanded": lambda x, i: x * W[:1].expand(x.shape[0], -1).unsqueeze(1),
    "layer norm": lambda x, i: F.layer_norm(x, (3,)),
    "norms": lambda x, i: F.normalize(x, dim=-1) + x.norm(dim=(1, 2), keepdim=True),
    "top": lambda x, i: x.topk(2, 1).values.flatten(1),
    "indexed": lambda x, i: x[:, [0, 2, 2]],
    "one-hot": lambda x, i: F.one_hot(i, 9).float().sum(1) + x[:, 0, :1],
    "attention": lambda x, i: F.scaled_dot_product_attention(x, x, x),
    "einsum": lambda x, i: torch.einsum("nbi,nbj,ik->bnjk", x.transpose(0, 1), x.transpose(0, 1), W),
    "padded": lambda x, i: F.pad(x, (0, 1)),
    "cumulative": lambda x, i: x.cumsum(1),
    "no dims of size 1": lambda x, i: x.unsqueeze(1).squeeze(),
    "rows several times each": lambda x, i: x.repeat_interleave(2, 0).reshape(-1, 2, 4, 3).sum(1),
    "elements several times each": lambda x, i: x.repeat_interleave(2, 1),
    "repeated beside rows": lambda x, i: x.repeat(1, 2, 1),
    "repeated for rows": lambda x, i: x[:, :, 0] + torch.arange(4).repeat(x.shape[0], 1),
    "the largest of several lists a row": lambda x, i: x.reshape(-1, 1, 3).topk(1, 1).values.reshape(-1, 4, 3),
}
MIX: dict[str, Callable[..., Tensor]] = {
    "a mean of the batch": lambda x, i: x - x.mean(0),
    "all pairs of rows": lambda x, i: x[:, 0] @ x[:, 1].T,
    "a norm of the batch": lambda x, i: F.normalize(x, dim=0),
    "softmax over the batch": lambda x, i: x.softmax(0),
    "cumulative over the batch": lambda x, i: x.cumsum(0),
    "reversed": lambda x, i: x.flip(0),
    "the number of rows": lambda x, i: x * x.shape[0],
    "row numbers": lambda x, i: x[:, 0, 0] * torch.arange(x.shape[0]),
    "the first row": lambda x, i: x - x[0],
    "other groups": lambda x, i: x.reshape(4, -1, 3).sum(0),
    "batch norm in training": lambda x, i: F.batch_norm(x, None, None, training=True),
    "a pooling over rows": lambda x, i: F.max_pool1d(x.permute(1, 2, 0), 3, 1, 1).permute(2, 0, 1),
    "rows beside rows": lambda x, i: torch.cat([x, x], 0).sum(1),
    "ids of the largest": lambda x, i: F.one_hot(i % (i.max() + 1), 9).float() * (i == i.max()).unsqueeze(2),
    "a sum over rows": lambda x, i: torch.einsum("bij,bij->ij", x, x).unsqueeze(0) + x,
    "all pairs of rows, as letters": lambda x, i: torch.einsum("aij,bij->ab", x, x),
    "the diagonal of rows": lambda x, i: torch.einsum("bib->bi", torch.einsum("aij,bij->aib", x, x)),
    "spread": lambda x, i: x[:, :, 0].unsqueeze(0) - x[:, :, 0].unsqueeze(1),
    "rows behind rows": lambda x, i: x.repeat(2, 1, 1).reshape(-1, 2, 4, 3).sum(1),
}


def placement(function: Callable[..., Tensor]) -> tuple[object, Model]:
    model = Model(function)
    module = capture(model, (torch.randn(6, 4, 3), torch.randint(0, 9, (6, 2)))).graph
    normalize(module)
    batch = batch_symbol([node.meta["val"] for node in module.graph.find_nodes(op="placeholder")])
    assert batch is not None
    (output,) = module.graph.find_nodes(op="output")
    return rows_of(module.graph, batch)[output.args[0][0]], model


@pytest.mark.parametrize("name", KEEP)
def test_rows_that_stay_apart(name: str) -> None:
    place, model = placement(KEEP[name])
    assert place == Rows(0)
    x, i = torch.randn(7, 4, 3), torch.randint(0, 9, (7, 2))
    pieces = torch.cat([model(x[:3], i[:3]), model(x[3:], i[3:])])
    torch.testing.assert_close(pieces, model(x, i))


@pytest.mark.parametrize("name", MIX)
def test_rows_that_mix(name: str) -> None:
    place, _ = placement(MIX[name])
    assert place != Rows(0)


def test_rows_behind_another_dim() -> None:
    place, _ = placement(lambda x, i: x.permute(1, 2, 0) + 1)
    assert place == Rows(2)
