"""Which calls one capture serves: argument structure, constants, tensor metadata, and the state it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxopt.runtime.flatten import flattener, is_constant

if TYPE_CHECKING:
    from fxopt.capture import Capture, StateSlot

_PLAIN = frozenset((Tensor, nn.Parameter))
_DTYPE, _SHAPE, _DEVICE, _LAYOUT = map(attrgetter, ("dtype", "shape", "device", "layout"))


@dataclass(frozen=True)
class TensorForm:
    """What must hold of one tensor: dims are sizes, or symbols that must agree wherever they recur."""

    dtype: torch.dtype
    device: torch.device
    dims: tuple[int | str, ...]


class TensorCheck:
    """``check(tensors)``: plain strided tensors of these forms."""

    def __init__(self, forms: Sequence[TensorForm]) -> None:
        self._dtypes = [form.dtype for form in forms]
        self._devices = [form.device for form in forms]
        self._layouts = [torch.strided] * len(forms)
        self._shapes = _shape_check([form.dims for form in forms])

    def __call__(self, tensors: Sequence[Any]) -> bool:
        return (
            _PLAIN.issuperset(map(type, tensors))
            and list(map(_DTYPE, tensors)) == self._dtypes
            and self._shapes(list(map(_SHAPE, tensors)))
            and list(map(_DEVICE, tensors)) == self._devices
            and list(map(_LAYOUT, tensors)) == self._layouts
        )


def _shape_check(dims: Sequence[tuple[int | str, ...]]) -> Callable[[list], bool]:
    """A function that compares all shapes with one list, in which each symbol is read from its first tensor."""
    if all(isinstance(d, int) for shape in dims for d in shape):
        expected = [torch.Size(shape) for shape in dims]  # type: ignore[arg-type]
        return expected.__eq__
    symbols: dict[str, str] = {}
    for i, shape in enumerate(dims):
        for j, dim in enumerate(shape):
            if isinstance(dim, str) and dim not in symbols:
                symbols[dim] = f"s[{i}][{j}]"
    local = {symbol: f"d{i}" for i, symbol in enumerate(symbols)}
    distinct = {shape: f"t{i}" for i, shape in enumerate(dict.fromkeys(dims))}
    lines = ["def check(s):", " try:"]
    lines += [f"  {local[symbol]} = {where}" for symbol, where in symbols.items()]
    lines += [" except IndexError: return False"]
    for shape, name in distinct.items():
        lines.append(f" {name} = ({''.join(f'{d if isinstance(d, int) else local[d]}, ' for d in shape)})")
    lines.append(f" return s == [{', '.join(distinct[shape] for shape in dims)}]")
    scope: dict[str, Any] = {}
    exec("\n".join(lines), scope)  # only integers and the names made above
    return scope["check"]


def forms_of(capture: Capture) -> list[TensorForm]:
    """A capture's input specs, with the equal and the static sizes of its guards written into the dims."""
    dims = [list(spec.dims) for spec in capture.inputs]
    for number, group in enumerate(capture.guards.equal):
        for tensor, dim in group:
            dims[tensor][dim] = f"equal{number}"
    for (tensor, dim), size in capture.guards.static:
        dims[tensor][dim] = size
    return [TensorForm(spec.dtype, spec.device, tuple(d)) for spec, d in zip(capture.inputs, dims, strict=True)]


class Signature:
    """Argument structure, constants, tensor forms, and a predicate on the tensors for what forms cannot say."""

    def __init__(
        self,
        spec: pytree.TreeSpec,
        forms: Sequence[TensorForm],
        constants: dict[int, Any],
        holds: Callable[[Sequence[Tensor]], bool] | None = None,
    ) -> None:
        self._flatten = flattener(spec, constants)
        self._check = TensorCheck(forms)
        self._holds = holds

    @classmethod
    def of_capture(cls, capture: Capture) -> Signature:
        holds = capture.guards.holds if capture.guards.relations else None
        return cls(capture.in_spec, forms_of(capture), dict(capture.constants), holds)

    @classmethod
    def of_call(cls, args: tuple, kwargs: dict) -> Signature:
        """The signature of one call, every size free: what a failed capture is remembered by."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        forms = [
            TensorForm(t.dtype, t.device, tuple(f"s{i}_{j}" for j in range(t.dim()))) for i, t in enumerate(tensors)
        ]
        return cls(spec, forms, {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)})

    def bind(self, args: tuple, kwargs: dict) -> tuple[Tensor, ...] | None:
        """The tensor inputs in order, or None when this call is not of the signature."""
        tensors = self._flatten(args, kwargs)
        if tensors is None or not self._check(tensors) or (self._holds and not self._holds(tensors)):
            return None
        return tensors


class State:
    """Reads parameters and buffers from the live modules at each call, so that whatever replaces them takes effect.

    Args:
        model: the root.
        slots: in the graph's order.
    """

    def __init__(self, model: nn.Module, slots: Sequence[StateSlot]) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        self._wheres = [getattr(modules[s.module], f"_{s.kind}s") for s in slots]
        self._keys = [s.name for s in slots]
        tensors = list(map(getitem, self._wheres, self._keys))
        self._check = TensorCheck([TensorForm(t.dtype, t.device, tuple(t.shape)) for t in tensors])

    def read(self) -> list[Tensor] | None:
        """The state tensors now, or None when one is gone or changed its form."""
        try:
            tensors = list(map(getitem, self._wheres, self._keys))
        except KeyError:
            return None
        return tensors if self._check(tensors) else None


def unsupported(args: tuple, kwargs: dict) -> str:
    """Why no capture can serve these arguments ("" when one might)."""
    for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
        where = pytree.keystr(path)
        if isinstance(leaf, Tensor):
            if type(leaf) not in _PLAIN or leaf.layout is not torch.strided:
                return f"argument {where}: expected a plain strided tensor, found {type(leaf).__name__} ({leaf.layout})"
        elif not is_constant(leaf):
            return f"argument {where}: expected a tensor or an immutable value, found {type(leaf).__name__}"
    return ""
