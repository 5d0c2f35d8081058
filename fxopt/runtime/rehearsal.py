"""A call of a model that leaves nothing behind: what it raises is the model's own."""

from __future__ import annotations

import contextlib

import torch
from torch import nn


def rehearse(model: nn.Module, args: tuple, kwargs: dict) -> None:
    """Run the model once, if that can be done so. Raises what it raises."""
    from fxopt.capture import CaptureError  # the first capture has paid for these imports
    from fxopt.capture.generators import undrawn
    from fxopt.capture.reach import Reach
    from fxopt.capture.untouched import Look, looked

    reach = Reach(model)
    if reach.once or reach.barred:
        return
    look = Look()
    with torch.inference_mode(False), torch.no_grad(), undrawn(model):
        root = look.copy(model).root
        inputs, keywords = look.own_inputs((args, kwargs))
        with contextlib.suppress(CaptureError):
            looked(look, root, *inputs, **keywords)
