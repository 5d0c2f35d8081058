"""Which calls one capture serves: argument structure, constants, tensor metadata, and the state it reads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxopt import trees
from fxopt.runtime.checks import PLAIN, TensorForm, fast, python_apart, python_unchanged, reader, tensor_check
from fxopt.runtime.flatten import Flatten, flattener, is_constant
from fxopt.shape.aliases import Aliases

if TYPE_CHECKING:
    from fxopt.capture import Capture


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
    """Argument structure, constants, tensor forms, which tensors are one object (`firsts`: forward may ask `q is k`),
    and a predicate on the tensors for what forms cannot say."""

    def __init__(
        self,
        spec: pytree.TreeSpec,
        forms: Sequence[TensorForm],
        constants: dict[int, Any],
        holds: Callable[[Sequence[Tensor]], bool] | None = None,
        firsts: Sequence[int] = (),
    ) -> None:
        self.flatten = flattener(spec, constants)
        self._check = tensor_check(forms, firsts)
        self._look = self._check.look
        self._holds = holds

    @classmethod
    def of_capture(cls, capture: Capture) -> Signature:
        holds = capture.guards.beyond_sizes  # those are in the forms
        return cls(capture.in_spec, forms_of(capture), dict(capture.constants), holds, capture.firsts)

    @classmethod
    def of_call(cls, args: tuple, kwargs: dict) -> Signature:
        """The signature of one call, every size free: what a failed capture is remembered by."""
        leaves, spec = trees.flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        forms = [
            TensorForm(t.dtype, t.device, tuple(f"s{i}_{j}" for j in range(t.dim()))) for i, t in enumerate(tensors)
        ]
        return cls(spec, forms, {i: leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)})

    def flattened_by(self, flatten: Flatten) -> Signature:
        """The same, but for the arguments that this function makes its tensors of."""
        other = copy.copy(self)
        other.flatten = flatten
        return other

    def bind(self, args: tuple, kwargs: dict) -> Sequence[Tensor] | None:
        """The tensor inputs in order, or None when this call is not of the signature."""
        flat = self.flatten(args, kwargs)
        tensors = None if flat is None else self._look(flat)
        return None if tensors is None or (self._holds and not self._holds(tensors)) else tensors


class State:
    """Reads parameters and buffers from the live modules at each call, so that whatever replaces them takes effect.

    A tensor that the model also reaches by another name (tied weights, a list of tables) must stay the same under
    both, because the graph reads it by one.

    Args:
        model: the root.
        capture: what was captured of it; its placeholders have the forms that the state must have.
    """

    def __init__(self, model: nn.Module, capture: Capture) -> None:
        slots = capture.state
        fakes = [n.meta["val"] for n in capture.graph.graph.find_nodes(op="placeholder")[: len(slots)]]
        modules = dict(model.named_modules(remove_duplicate=False))
        self._wheres = [getattr(modules[s.module], f"_{s.kind}s") for s in slots]
        self._keys = [s.name for s in slots]
        self._read, self._unchanged = reader(), fast(python_unchanged)
        tensors = self._read(self._wheres, self._keys) or []
        self.forms = [TensorForm(t.dtype, t.device, tuple(t.shape)) for t in fakes]
        self._check = tensor_check(self.forms)
        self._look = self._check.look
        own = set(zip(map(id, self._wheres), self._keys, strict=True))
        aliases = [a for a in _aliases(model, tensors) if (id(a[0]), a[1]) not in own]
        self._alias_wheres = [where for where, _, _ in aliases]
        self._alias_keys = [key for _, key, _ in aliases]
        self._alias_of = [index for _, _, index in aliases]

    @property
    def places(self) -> list[tuple[dict[str, Any], str]]:
        """Where each tensor is: ``dict[key]``."""
        return list(zip(self._wheres, self._keys, strict=True))

    @property
    def aliases(self) -> list[tuple[dict[str, Any], str, int]]:
        """Where else a tensor is, and which one it is."""
        return list(zip(self._alias_wheres, self._alias_keys, self._alias_of, strict=True))

    def read(self) -> Sequence[Tensor] | None:
        """The state tensors now, or None when one is gone, changed its form, or is no longer tied."""
        found = self._read(self._wheres, self._keys)
        tensors = None if found is None else self._look(found)
        if tensors is None:
            return None
        if self._alias_of:
            expected = [tensors[i] for i in self._alias_of]
            if not self._unchanged(self._alias_wheres, self._alias_keys, expected):
                return None
        return tensors

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors have the form of the state."""
        return self._check(tensors)


class Sharing:
    """Which memory the graph edits, and that it is under no other tensors of a call than it was in the capture.

    Tensors that were made in inference mode are edited there alone: elsewhere torch edits them, and then raises.

    Attributes:
        any: whether the graph edits state or inputs at all.
    """

    def __init__(self, capture: Capture) -> None:
        graph = capture.graph.graph
        aliases = Aliases(graph)
        edited = set(aliases.edited_inputs())
        placeholders = graph.find_nodes(op="placeholder")
        place = {node: number for number, node in enumerate(placeholders)}
        groups = {node: min(place.get(other, len(place)) for other in aliases.sharing(node)) for node in edited}
        self._groups = [groups.get(node, -1) for node in placeholders]
        self._edited = [place[node] for node in edited if node in place]
        self._apart = fast(python_apart)
        self.any = bool(edited)

    def holds(self, tensors: list[Tensor]) -> bool:
        """Of the state and the inputs, in the graph's order."""
        if not torch.is_inference_mode_enabled() and any(tensors[number].is_inference() for number in self._edited):
            return False
        return self._apart(tensors, self._groups)


class Sizes:
    """The forms of tensors that the graph does not take from the state, but that its trace may have asked for a size:
    parameters and buffers it does not read (`ids % self.vocabulary.numel()`), and constants that the user holds.

    Args:
        model: the root.
        capture: what was captured of it.
        replaced: attributes that the capture assigns itself at each call, and has not looked at before, by module.
    """

    def __init__(self, model: nn.Module, capture: Capture, replaced: Mapping[nn.Module, set[str]]) -> None:
        unread = list(_unread(model, capture, replaced))
        self._wheres, self._keys = [where for where, _ in unread], [key for _, key in unread]
        self._read = reader()
        self._constants = _held(capture)
        tensors = [*(where[key] for where, key in unread), *self._constants]
        forms = [TensorForm(t.dtype, t.device, tuple(t.shape)) for t in tensors]
        self._check = tensor_check(forms)
        self.places = [(where, key, form) for (where, key), form in zip(unread, forms, strict=False)]
        self.any = bool(tensors)

    def hold(self) -> bool:
        tensors = self._read(self._wheres, self._keys)
        return tensors is not None and self._check([*tensors, *self._constants])


def _unread(
    model: nn.Module, capture: Capture, replaced: Mapping[nn.Module, set[str]]
) -> Iterator[tuple[dict[str, Any], str]]:
    modules = dict(model.named_modules())
    known = {id(slot.read(model)) for slot in capture.state}
    for path, module in modules.items():
        if any(f"{path}.".startswith(f"{leaf.path}.") for leaf in capture.leaves):
            continue
        for where in (module._parameters, module._buffers):
            for key, tensor in where.items():
                if _is_plain(tensor) and id(tensor) not in known and key not in replaced.get(module, ()):
                    yield where, key


def _held(capture: Capture) -> list[Tensor]:
    """Constants but for those that the forward makes: torch.tensor(...), which is traced as a copy."""
    nodes = capture.graph.graph.find_nodes(op="get_attr")
    shared = [n for n in nodes if any(user.target is not torch.ops.aten.lift_fresh_copy.default for user in n.users)]
    tensors = [getattr(capture.graph, str(node.target)) for node in shared]
    return [tensor for tensor in tensors if _is_plain(tensor)]


def _is_plain(tensor: object) -> bool:
    return type(tensor) in PLAIN and tensor.layout is torch.strided  # type: ignore[attr-defined]


def _aliases(model: nn.Module, tensors: Sequence[Tensor]) -> Iterator[tuple[Any, Any, int]]:
    """(container, key, index) of every place in the module tree that holds ``tensors[index]``."""
    index_of = {id(tensor): i for i, tensor in enumerate(tensors)}

    def search(where: Any, items: Iterable[tuple[Any, Any]], depth: int) -> Iterator[tuple[Any, Any, int]]:
        for key, value in items:
            if isinstance(value, Tensor):
                if id(value) in index_of:
                    yield where, key, index_of[id(value)]
            elif depth and isinstance(value, dict):
                yield from search(value, value.items(), depth - 1)
            elif depth and isinstance(value, (list, tuple)):
                yield from search(value, enumerate(value), depth - 1)

    for module in model.modules():
        yield from search(vars(module), vars(module).items(), 3)


def holds_array(value: object) -> bool:
    """Whether there is a NumPy array among arguments, which no capture serves."""
    if isinstance(value, list | tuple):
        return any(map(holds_array, value))
    return any(map(holds_array, value.values())) if isinstance(value, dict) else isinstance(value, np.ndarray)


def unsupported(args: tuple, kwargs: dict) -> str:
    """Why no capture can serve these arguments ("" when one might)."""
    for path, leaf in trees.flatten_with_path((args, kwargs))[0]:
        where = pytree.keystr(path)
        if isinstance(leaf, Tensor):
            if type(leaf) not in PLAIN or leaf.layout is not torch.strided:
                return f"argument {where}: expected a plain strided tensor, found {type(leaf).__name__} ({leaf.layout})"
        elif not is_constant(leaf):
            return f"argument {where}: expected a tensor or an immutable value, found {trees.unread(leaf)}"
    for features in trees.features_in((args, kwargs)):
        if not trees.inverts_in_order(features):
            found = f"{list(features.inverse_indices()[0])}, not {features.keys()}"
            return f"the inverse indices of a KeyedJaggedTensor: expected the order of its keys, found {found}"
    return ""
