"""A look at a model that leaves no trace: a run on a copy, whose writes go to memory of its own.

Small tensors are copied before the run. Large ones, and whatever else the model reaches (globals, what closures hold),
are shared, and copied when an operator is about to write to them; from then on operators read the copy. So nobody who
serves the model meanwhile sees a write, and a look at gigabytes of tables copies none of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fxopt import trees
from fxopt.capture.prints import printing
from fxopt.capture.reach import Reach
from fxopt.capture.state import ModelCopy
from fxopt.capture.uncompiled import nothing_compiled
from fxopt.torch_internals.storage import is_borrowed, number_of, set_version, storage_number

LARGE = 1 << 20  # bytes
_STATISTICS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}  # written, says no schema


class Look(TorchDispatchMode):
    """The memory of one look at a model. As a mode, it watches what operators write to.

    Args:
        large: memory of more bytes is shared until it is written; LARGE by default.

    Attributes:
        log: the storages (their numbers) that operators wrote to, in order.
    """

    def __init__(self, large: int | None = None) -> None:
        super().__init__()
        self._large = LARGE if large is None else large
        self.log: list[int] = []
        self._memory: dict[int, torch.UntypedStorage] = {}  # of others, by number, to what stands for it
        self._copies: dict[int, torch.UntypedStorage] = {}  # shared, and written by now
        self._keep: list[Any] = []  # numbers stay valid
        self._versions: list[tuple[torch.Tensor, int]] = []

    def copy(self, model: nn.Module) -> ModelCopy:
        return ModelCopy(model, lambda tensor, slot: self.own(tensor), self.own)

    def own_inputs(self, values: Any) -> Any:
        """A tree of arguments with tensors of its own."""
        return trees.map_only(torch.Tensor, self.own, values)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same values, whose memory is a copy's, or is copied before it is written."""
        self._keep.append(tensor)
        if not trees.is_dense(tensor) or tensor.is_conj() or tensor.is_neg():
            return tensor.detach().clone()
        memory = self._standing_for(tensor.untyped_storage())
        new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        if not tensor.is_leaf:  # which may be edited where a leaf that requires a gradient may not
            with torch.enable_grad():
                new = new.requires_grad_().clone()
        with torch.no_grad():
            new.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, tensor.requires_grad)
        vars(new).update(vars(tensor))
        return new.requires_grad_(tensor.requires_grad) if tensor.is_leaf else new

    def clone(self, tensor: torch.Tensor) -> None:
        """Copy the memory of this tensor before the run, however large."""
        self._keep.append(storage := tensor.untyped_storage())
        self._memory[number_of(storage)] = storage.clone()

    def adopt(self, values: Any, others: Sequence[torch.Tensor]) -> None:
        """The memory of these is the run's own, to be written where it is; but for what is that of `others`."""
        shared = {storage_number(tensor) for tensor in filter(has_memory, others)}
        for tensor in filter(has_memory, trees.leaves(values)):
            if storage_number(tensor) not in shared:
                _mark(tensor.untyped_storage())

    def _standing_for(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        number = number_of(storage)
        if number not in self._memory:
            self._keep.append(storage)
            self._memory[number] = memory = storage.clone() if storage.nbytes() <= self._large else storage
            if memory is not storage:
                _mark(memory)
        return self._memory[number]

    def writes(self, tensor: torch.Tensor, since: int = 0) -> bool:
        """Whether the memory of one of its tensors was written, from this length of the log on."""
        return has_memory(tensor) and storage_number(tensor) in self.log[since:]

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """One of its tensors as the look left it."""
        return self._on_copy(tensor.detach())

    def results(self, values: Any) -> Any:
        """What a forward returned, with what was written in place into tensors that no operator has made, such as
        `torch.FloatTensor([0.0])`."""
        return trees.map_only(torch.Tensor, self._as_written, values) if self._copies else values

    def _as_written(self, tensor: torch.Tensor) -> torch.Tensor:
        new = self._on_copy(tensor)
        return _Valued.apply(tensor, new) if new is not tensor and tensor.requires_grad else new

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for tensor, version in self._versions:
            set_version(tensor, version)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, spec = pytree.tree_flatten((args, kwargs or {}))
        tensors = [value for value in given if has_memory(value)]
        for tensor in written(func, args, kwargs or {}):
            self._about_to_write(tensor)
        back: dict[int, torch.Tensor] = {}
        if self._copies:
            for place, value in enumerate(given):
                if isinstance(value, torch.Tensor) and (new := self._on_copy(value)) is not value:
                    given[place], back[id(new)] = new, value
            args, kwargs = pytree.tree_unflatten(given, spec)
        result = func(*args, **(kwargs or {}))
        read = {storage_number(tensor) for tensor in tensors}
        made = func is torch.ops.aten.lift_fresh.default and not is_borrowed(tensors[0])  # torch.tensor()
        for out in pytree.tree_leaves(result):
            if has_memory(out) and id(out) not in back and storage_number(out) not in (self._memory if made else read):
                _mark(out.untyped_storage())
        return pytree.tree_map_only(torch.Tensor, lambda out: back.get(id(out), out), result) if back else result

    def _about_to_write(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.log.append(number_of(storage))
        if _is_marked(storage) or number_of(storage) in self._copies:
            return
        self._keep.append(storage)
        if not tensor.is_inference():
            self._versions.append((tensor, tensor._version))
        self._copies[number_of(storage)] = memory = storage.clone()
        _mark(memory)

    def _on_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        memory = self._copies.get(storage_number(tensor)) if self._copies and has_memory(tensor) else None
        if memory is None:
            return tensor
        new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return new.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]


class _Valued(torch.autograd.Function):
    """A tensor with the values of another one."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad, None


def has_memory(value: Any) -> bool:
    """Whether it is a plain tensor whose memory a look can follow."""
    return trees.is_dense(value)


def written(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], which: Callable[[Any], bool] = has_memory
) -> Iterator[torch.Tensor]:
    """The tensors, of these, whose memory an operator writes to (not those whose sizes it edits)."""
    if torch.Tag.inplace_view in func.tags:
        return
    if func._schema.is_mutable:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                yield from filter(which, pytree.tree_leaves(value))
    elif func.overloadpacket.__name__ in _STATISTICS and args[5]:
        yield from filter(which, args[3:5])


def _mark(storage: torch.UntypedStorage) -> None:
    """The run's own; the storage carries the mark, since its number is given out again when it dies."""
    storage._of_a_look = True  # type: ignore[attr-defined]


def _is_marked(storage: torch.UntypedStorage) -> bool:
    return getattr(storage, "_of_a_look", False)


@contextlib.contextmanager
def quietly(model: nn.Module) -> Iterator[None]:
    """Nothing that this thread prints is seen, no random state of torch advances, and what the code of `model` changes
    outside of it is put back.
    """
    reach = Reach(model)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with printing(lambda *args, **kwargs: None), torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            reach.put_back()


def looked(look: Look, copy: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a copied model, whose writes `look` keeps."""
    with quietly(copy), nothing_compiled(), look:
        return look.results(type(copy).forward(copy, *args, **kwargs))
