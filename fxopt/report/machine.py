"""The machine that a report's times were measured on."""

from __future__ import annotations

import itertools

import torch
from torch import nn

import fxopt
from fxopt.machine import processor
from fxopt.report.data import Machine


def machine(model: nn.Module, measuring: bool) -> Machine:
    """Of the device that the model is on; what that device reaches is measured where times are."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    bandwidth = arithmetic = None
    if measuring:
        from fxopt.report.own_time import rates

        bandwidth, arithmetic = rates(device)
    threads = torch.get_num_threads()
    return Machine(processor(), threads, torch.__version__, name, fxopt.__version__, bandwidth, arithmetic)
