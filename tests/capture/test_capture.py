from __future__ import annotations

import torch
from torch import nn

from fxopt.capture import capture


def test_linear_is_captured():
    model = nn.Linear(3, 2)
    found = capture(model, (torch.rand(1, 3),))
    x = torch.rand(5, 3)
    assert found.guards.holds([x])
    (out,) = found.graph(*[slot.read(model) for slot in found.state], x)
    torch.testing.assert_close(out, model(x))
