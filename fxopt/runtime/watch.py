"""What a capture took from the module tree besides its tensors, and whether it still holds.

A traced graph has Python attributes, train/eval flags, submodules and the absence of hooks baked in.
`Watch` remembers them as (dict, key, value) triples, which `Unchanged` compares.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fxopt.reach.code import Code
from fxopt.reach.entries import MISSING
from fxopt.runtime.flatten import same_value
from fxopt.runtime.inside import Inside, Slot
from fxopt.runtime.slots import (
    attributes_of,
    forward_slots,
    named_slots,
    seen_around,
    sized_in,
    slots_in,
    slots_on_tensors,
    tensor_slots,
)
from fxopt.runtime.unchanged import Unchanged
from fxopt.torch_internals.hooks import GLOBAL_HOOKS, HOOKS
from fxopt.trees import is_dense

if TYPE_CHECKING:
    from fxopt.capture.captured import Read


class Watch:
    """The module tree as it was when a capture began.

    Args:
        model: the root.
        opaque: paths of submodules whose inside the capture does not depend on.
        ignore: names of slots not to watch.
        stored: attributes that the capture assigns itself at each call, by module.
        since: an earlier look at the model, whose values are the ones to expect.
        read: tensors that are no state, the versions that they keep, and the numbers, where an edit may have no version
            (that of x.data, or of an array that shares the memory).
        only: paths of the modules to watch, by default all that are not inside of opaque ones.

    Attributes:
        too_large: what it leaves out, and whose changes it would miss.
    """

    def __init__(
        self,
        model: nn.Module,
        opaque: tuple[str, ...] = (),
        ignore: frozenset[str] = frozenset(),
        stored: Mapping[nn.Module, set[str]] = MappingProxyType({}),
        since: Watch | None = None,
        only: frozenset[str] | None = None,
        read: Sequence[Read] = (),
    ) -> None:
        every = [(p, m) for p, m in model.named_modules() if not isinstance(m, torch.jit.ScriptModule)]
        modules = [(p, m) for p, m in every if not _inside(p, opaque) and (only is None or p in only)]
        leaves = [module for path, module in every if path in opaque or (only is not None and path not in only)]
        code = Code.behind((module for _, module in modules), without=leaves)
        tree = {module for _, module in every}
        scripted = torch.jit.ScriptModule
        found = [v for v in code.held if isinstance(v, nn.Module) and not isinstance(v, scripted)]
        hidden = [("", module) for module in found if module not in tree]  # in a list, or behind an object
        modules += hidden
        slots = [slot for path, module in modules for slot in slots_in(path, module, code)]
        slots += [slot for _, module in hidden for slot in tensor_slots(module)]
        slots += [slot for path, module in every if _inside(path, opaque) for slot in seen_around(path, module, code)]
        slots += [*forward_slots(modules), *named_slots(code), *slots_on_tensors(code)]
        named = {slot.key for slot in slots} if code.computed else code.names
        asked = [s for s in slots if str(s) not in ignore and (s.kind not in ("attribute", "tree") or s.key in named)]
        # A trace that uses what each thread has of its own gives no capture: other threads need no other one.
        apart = (threading.local,) if since is not None else ()
        inside = Inside([*((s.path or s.key, s.read()) for s in asked), *attributes_of(code)], code, apart)
        slots += inside.slots
        places = [(vars(module), names) for module, names in stored.items()]
        places += [(module._buffers, names) for module, names in stored.items()]
        assigned = {(id(where), name) for where, names in places for name in names}
        self._slots = [s for s in slots if str(s) not in ignore and (id(s.where), s.key) not in assigned]
        self._values = [slot.read() for slot in self._slots]
        self._ordered = [*inside.ordered, *(m._modules for _, m in modules if isinstance(m, nn.ModuleDict))]
        self._ordered += [vars(module)[name] for _, module in hidden for name in HOOKS]  # which are traced
        self._orders = list(map(list, self._ordered))
        self.too_large = inside.too_large
        self._arrays = inside.arrays
        self._contents = list(map(_content_of, self._arrays))
        self._bytes = [content() for content in self._contents]
        self._objects = [*inside.objects, *(module for _, module in modules)]
        self._kinds = list(map(type, self._objects))
        self._stored = [(vars(module), names) for module, names in stored.items()]
        open_ended = {id(attributes) for attributes, _ in self._stored}
        sized = [(path, d) for path, module in modules for d in sized_in(module) if id(d) not in open_ended]
        self._others = [attributes.keys() - names for attributes, names in self._stored]
        self._sized = [*(d for _, d in sized), *(v for v in inside.sized if id(v) not in open_ended)]
        self._sized += map(vars, code.classes)  # what hides an attribute, or appears
        self._sizes = list(map(len, self._sized))
        self._known = [(path, d, frozenset(d)) for path, d in sized]
        inner = [m for p, m in modules if m is not model]  # the root's own hooks run around the graph
        hooks = [*GLOBAL_HOOKS, *(vars(m)[name] for m in inner for name in HOOKS)]
        self._present = [d for d in hooks if d]
        self._absent = [d for d in hooks if not d]
        self._hook_id = RemovableHandle.next_id
        self._read = read
        self._is_plain = not (self._contents or self._stored or self._read or self._present)
        if since is not None:
            self._expect(since, opaque)
        shapes: list[Any] = [*zip(self._sized, self._sizes, strict=True), *zip(self._objects, self._kinds, strict=True)]
        orders = list(zip(self._ordered, self._orders, strict=True))
        own = (attributes for attributes, _ in self._stored)
        self._is_unchanged = Unchanged(self.slots, shapes, orders, own).holds

    def _expect(self, since: Watch, opaque: tuple[str, ...]) -> None:
        """What `since` saw; but opaque modules as they are now, since the capture has run them."""
        known: dict[Any, Any] = {slot.identity: value for slot, value in zip(since._slots, since._values, strict=True)}
        ours = [(slot.path in opaque, slot, value) for slot, value in zip(self._slots, self._values, strict=True)]
        self._values = [value if free else known.get(slot.identity, MISSING) for free, slot, value in ours]
        free = {id(slot.where) for inside, slot, _ in ours if inside} | {
            id(value) for inside, _, value in ours if inside
        }
        self._orders = _of(since._ordered, since._orders, self._ordered, self._orders, free)
        self._kinds = _of(since._objects, since._kinds, self._objects, self._kinds, free)
        self._bytes = _of(since._arrays, since._bytes, self._arrays, self._bytes, free)
        self._sizes = _of(since._sized, since._sizes, self._sized, self._sizes, free)
        self._absent += [d for d in self._present if any(d is absent for absent in since._absent)]
        self._hook_id = since._hook_id

    def shared_memory(self, model: nn.Module) -> str:
        """The first parameter or buffer over whose memory an array lies that a forward may read, "" for none."""
        arrays = [array for array in self._arrays if isinstance(array, np.ndarray)]
        named = [*model.named_parameters(), *model.named_buffers()] if arrays else []
        for name, tensor in ((name, tensor) for name, tensor in named if tensor.is_cpu and is_dense(tensor)):
            whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage()).numpy()  # type: ignore[call-overload]
            if any(np.may_share_memory(array, whole) for array in arrays):
                return name
        return ""

    @property
    def slots(self) -> list[tuple[Any, str, Any]]:
        """(container, key, value) of all that is watched."""
        return [(slot.where, slot.key, value) for slot, value in zip(self._slots, self._values, strict=True)]

    @property
    def lengths(self) -> list[tuple[Any, int]]:
        """(container, length) of all whose length is watched."""
        return list(zip(self._sized, self._sizes, strict=True))

    @property
    def modules(self) -> list[nn.Module]:
        """Whose attributes are watched."""
        return [each for each in self._objects if isinstance(each, nn.Module)]

    @property
    def size(self) -> int:
        """How much there is to look at."""
        return len(self._slots)

    def holds(self) -> bool:
        """Whether nothing changed."""
        return (
            self._is_unchanged()
            and (RemovableHandle.next_id == self._hook_id or self._still_absent())
            and (self._is_plain or self._rest_holds())
        )

    def _rest_holds(self) -> bool:
        """Whether what most models do not have is as it was."""
        return (
            all(self._present)
            and [content() for content in self._contents] == self._bytes
            and [d.keys() - names for d, names in self._stored] == self._others
            and all(map(_is_as_read, self._read))
        )

    def _still_absent(self) -> bool:
        now = RemovableHandle.next_id  # every registration of any hook takes one
        if any(self._absent):
            return False
        self._hook_id = now
        return True

    def same_tree(self) -> bool:
        """Whether the submodules are still the ones captured: if not, train() or an attribute cannot bring it back."""
        return all(
            _read(slot) is value
            for slot, value in zip(self._slots, self._values, strict=True)
            if slot.kind in ("module", "tree")
        )

    def changed(self) -> list[Slot]:
        """The watched values that differ now, and the new ones."""
        pairs = zip(self._slots, self._values, strict=True)
        differ = [slot for slot, value in pairs if not same_value(_read(slot), value)]
        new = [Slot(path, where, key, "new") for path, where, known in self._known for key in where.keys() - known]
        return [*differ, *new]


def _read(slot: Slot) -> Any:
    try:
        return slot.read()
    except LookupError:
        return MISSING


def _is_as_read(read: Read) -> bool:
    tensor, version, numbers = read
    return tensor._version == version and (numbers is None or torch.equal(tensor, numbers))


def _content_of(memory: Any) -> Callable[[], Any]:
    if isinstance(memory, np.ndarray):
        return lambda: (memory.shape, memory.dtype, memory.tobytes())
    return memory.tobytes if hasattr(memory, "tobytes") else functools.partial(bytes, memory)


def _of(keys: list, values: list, wanted: list, now: list, free: set[int]) -> list:
    """The value of each wanted object, by identity; the one of now where there was none, or it is free to change."""
    known = {id(key): value for key, value in zip(keys, values, strict=True) if id(key) not in free}
    return [known.get(id(key), value) for key, value in zip(wanted, now, strict=True)]


def _inside(path: str, opaque: tuple[str, ...]) -> bool:
    return any(path.startswith(leaf + ".") for leaf in opaque)
