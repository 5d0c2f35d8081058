"""A label that costs nothing while nobody profiles: the graphs of models with record_function depend on it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxopt import Config, optimize
from fxopt.torch_internals.labels import begin, end


class Labelled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.profiler.record_function("the sum"):
            return x.sum(1) + x.mean(1)


def test_no_label_without_a_profiler() -> None:
    label = begin("alone")
    end(label)
    assert label is None


@torch.no_grad()
def test_a_profiler_sees_the_labels_of_an_optimized_model() -> None:
    model = Labelled().eval()
    fast, x = optimize(model, config=Config(tune="off")), torch.randn(5, 3)
    torch.testing.assert_close(fast(x), model(x))
    with torch.autograd.profiler.profile() as seen:
        torch.testing.assert_close(fast(x), model(x))
    assert [event.name for event in seen.function_events].count("the sum") == 2
