"""x[start:end] whose ends are computed: the items of one feature among those of many, say.

A fake tensor cannot tell which of the ends lie behind the last item. It gives a size of Min and Max, or none where they
depend on data. Where start <= end is known and both lie within the tensor, the size is end - start. Where that depends
on data, a trace takes it for granted, and the graph asks it at every call (decided.py).
"""

from __future__ import annotations

from typing import Any

import torch

from fxopt.shape.floors import never_negative
from fxopt.torch_internals.fake_tensors import FakeTensor
from fxopt.torch_internals.symbols import expression, free_unbacked_symbols
from fxopt.torch_internals.tracing import disable_proxy_modes_tracing, number_proxy, proxy_of, record

aten = torch.ops.aten


def cut_within(func: Any, args: tuple, tracer: Any) -> torch.Tensor | None:
    """The result of a call, recorded, where it is such a slice."""
    if func is not aten.slice.Tensor:
        return None
    given: tuple[Any, ...] = (*args, *(None, 0, None, None, 1)[len(args) :])
    tensor, dim, start, end, step = given
    if step != 1 or not any(isinstance(place, torch.SymInt) for place in (start, end)):
        return None
    size = tensor.shape[dim]
    start = 0 if start is None else start
    end = size if end is None or (type(end) is int and end >= 2**62) else end
    if not all(map(_taken_for_granted, (start, end - start, size - end))):
        return None
    places = [number_proxy(place, tracer) if isinstance(place, torch.SymInt) else place for place in (start, end)]
    proxy = tracer.create_proxy("call_function", func, (proxy_of(tensor, tracer), dim, *places), {})
    with disable_proxy_modes_tracing():
        sizes, strides = list(tensor.shape), tensor.stride()
        sizes[dim] = end - start
        part = tensor.as_strided(sizes, strides, tensor.storage_offset() + start * strides[dim])
    record(part, proxy, tracer)
    return part


def with_numbers(index: Any) -> Any:
    """An index whose slices end at tensors, as in `x[:, : lengths.max()]`, with their numbers: a slice asks for those
    in C++, where they would become the ones of this trace."""
    if isinstance(index, tuple):
        return tuple(map(with_numbers, index))
    if not isinstance(index, slice):
        return index
    return slice(*(v.item() if isinstance(v, FakeTensor) else v for v in (index.start, index.stop, index.step)))


def _taken_for_granted(number: Any) -> bool:
    """Whether a number is not negative, or depends on data and is asked for that."""
    if isinstance(number, int) or not free_unbacked_symbols(number):
        return never_negative(expression(number))
    torch._check(number >= 0)
    return True
