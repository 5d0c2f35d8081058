"""What verification leaves in free memory, on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxopt
from fxopt.runtime import dispatcher_of
from fxopt.verify.poison import leave_nothing

pytestmark = pytest.mark.gpu


def test_memory_that_a_kernel_leaves_out_is_not_what_eager_freed():
    model = nn.Sequential(nn.Embedding(50, 100), nn.Flatten(), nn.Linear(300, 100)).cuda().eval()
    ids = torch.randint(0, 50, (256, 3), device="cuda")
    with torch.no_grad():
        fast = fxopt.optimize(model, (ids,), fxopt.Config(tune="off"))
        graph = dispatcher_of(fast).entries[0].executable.graph.graph
        ours = [node for node in graph.nodes if str(node.target).startswith("fxopt.")]
        assert ours
        torch.ones(256, 300, device="cuda")  # eager's result, freed
        leave_nothing(graph)
        assert torch.empty(256, 300, device="cuda").isnan().any()
