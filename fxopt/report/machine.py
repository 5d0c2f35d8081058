"""The machine that a report's times were measured on."""

from __future__ import annotations

import torch

from fxopt.machine import processor
from fxopt.report.data import Machine


def machine() -> Machine:
    return Machine(processor(), torch.get_num_threads(), torch.__version__)
