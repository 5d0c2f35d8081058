"""Which real tensors share memory: Parameters and buffers made as views of one another, inputs that view state."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from itertools import count
from typing import Any

import torch

from fxopt.torch_internals.modes import no_function_modes

Span = tuple[torch.device, int, int]  # begin and end


def span_of(tensor: torch.Tensor) -> Span | None:
    """The memory under a tensor: all of its storage. None where there is none."""
    try:
        with no_function_modes():  # no question of the traced code's
            storage = tensor.untyped_storage()
            begin = storage.data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, or of a subclass without memory
        return None
    return (tensor.device, begin, begin + storage.nbytes()) if begin else None


class Memory:
    """Numbers pieces of memory, in the order in which tensors are shown; what overlaps has a number in common.

    By address and not by storage: two tensors from one NumPy array have a storage each.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._begins: dict[torch.device, list[int]] = defaultdict(list)
        self._runs: dict[torch.device, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)  # end, numbers

    def of(self, tensor: Any) -> tuple[int, ...]:
        span = span_of(tensor)
        if span is None:
            return ()
        device, begin, end = span
        begins, runs = self._begins[device], self._runs[device]
        first, last = bisect_right(begins, begin), bisect_left(begins, end)
        if first and runs[first - 1][0] > begin:
            first -= 1
        numbers = tuple(number for _, known in runs[first:last] for number in known) or (next(self._numbers),)
        begin = min([begin, *begins[first:last]])
        end = max([end, *(run[0] for run in runs[first:last])])
        begins[first:last], runs[first:last] = [begin], [(end, numbers)]
        return numbers
