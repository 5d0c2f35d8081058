"""direct: the shorter way gives the same values; thousands of arguments arrive where they belong."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxopt import optimize
from fxopt.rewrites import direct


def test_bindings_take_the_overloads_arguments() -> None:
    def program(x: Tensor, w: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        y = torch.nn.functional.linear(x, w).relu()
        pooled = y.unsqueeze(1).expand(-1, 3, -1).sum(1, keepdim=True).squeeze(1)
        parts = torch.cat([y[:, 1:3], y[:, ::2], pooled.narrow(1, 0, 2)], 1).split(2, 1)
        crossed = torch.einsum("bi,bj->bij", y, y), torch.tensordot(y, w, dims=([1], [0]))
        picked = torch.nn.functional.embedding(ids, w).transpose(0, 1).flatten(0, 1)
        stacked = torch.stack([part.softmax(1) for part in parts[:2]], 1).mean([1], keepdim=False)
        masked = torch.where(picked > 0, picked, 0.5).clamp(-1, 1).pow(2).amax(-1)
        return (*parts, *crossed, picked, stacked, masked, y.view(-1).to(torch.float64), torch.add(y, y, alpha=2))

    tensors = torch.randn(4, 6), torch.randn(5, 6), torch.randint(0, 5, (3, 2))
    module = make_fx(program, pre_dispatch=True)(*tensors)
    expected = module(*tensors)
    direct.direct(module)
    left = {str(node.target) for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert left == {"aten.split.Tensor", "aten.einsum.default", "aten.tensordot.default"}, (
        "only these have Python bindings"
    )
    for one, other in zip(module(*tensors), expected, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype


def test_many_arguments_arrive_in_order() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(11, 3) for _ in range(direct._MANY))
            self.dense = nn.Linear(2, 5)

        def forward(self, dense: Tensor, ids: list[Tensor]) -> Tensor:
            columns = [table(i) for table, i in zip(self.tables, ids, strict=True)]
            return torch.cat([*columns[:7], self.dense(dense), *columns[7:]], 1)

    model = Many()
    ids = [torch.randint(0, 11, (4,)) for _ in model.tables]
    fast = optimize(model)
    with torch.no_grad():
        for batch in (4, 1, 0):
            arguments = torch.randn(batch, 2), [i[:batch] for i in ids]
            assert torch.equal(fast(*arguments), model(*arguments))
    assert len(fast._fxopt.entries) == 1
