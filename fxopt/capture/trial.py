"""A run of the model on a copy and real inputs, which tells what its leaves return, write and change.

It runs on the example and (if it accepts that) on the example twice over. (Not twice over on a GPU, where what it does
not accept may end the process: an assertion on the device.) An output that has an input's shape in both runs is taken
to follow it. So is an output dim that differs between the two and equals an input dim of the same leaf in both. Any
other that differs is a size of its own, and the rest are static.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from fxopt import trees
from fxopt.capture.boundaries import INSTALLED, Before
from fxopt.capture.effects import Attributes
from fxopt.capture.errors import CaptureError
from fxopt.capture.generators import Generators
from fxopt.capture.inputs import CONSTANTS
from fxopt.capture.leaves import Output, Signature, Trial
from fxopt.capture.prints import printing
from fxopt.capture.reach import Reach
from fxopt.capture.state import ModelCopy, StateSlot
from fxopt.capture.untouched import LARGE, Look, has_memory, quietly
from fxopt.reach.held import held_by
from fxopt.torch_internals.hooks import HOOKS


@dataclass(frozen=True)
class _Record:
    """One call in a trial run."""

    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    arguments: list[Any]
    values: list[Any]
    edits: bool
    state: frozenset[StateSlot]


def trial(model: nn.Module, leaves: set[str], args: tuple, kwargs: dict) -> Trial:
    """Run a copy of the model on real inputs and watch its leaves. The model's own errors pass through."""
    recorded = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(recorded):  # tensors of inference mode count no versions
        once = _Run(model, leaves, args, kwargs)
        again: dict[str, list[_Record]] = {}
        if leaves and all(tensor.device.type == "cpu" for tensor in _tensors(model, args, kwargs)):
            with contextlib.suppress(Exception):  # offsets cannot be doubled, for one: the first run has to do
                twice = trees.map_only(torch.Tensor, lambda t: torch.cat([t, t]) if t.ndim else t, (args, kwargs))
                again = _Run(model, leaves, *twice).records
    assigned = frozenset((path, name) for path, names in once.assigns.items() for name in names)
    records = once.records.items()
    found = Trial({p: _signatures(calls, again.get(p, []), assigned, once.outside) for p, calls in records})
    found.changes.update(once.changes)
    found.edits.update(slot for calls in once.records.values() for call in calls for slot in call.state)
    return found


def _tensors(model: nn.Module, *inputs: Any) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    yield from (leaf for leaf in trees.leaves(inputs) if isinstance(leaf, torch.Tensor))


class _Run:
    """A look at the model: records of each leaf's calls.

    Attributes:
        assigns: attributes that are changed in the end. changes: those that leaves have changed.
        outside: what leaves have changed outside of the model, "" if nothing.

    Raises:
        CaptureError: a leaf changes what the code around it sees otherwise than as its result.
    """

    def __init__(self, model: nn.Module, leaves: set[str], args: tuple, kwargs: dict):
        self._look = Look()
        self._copy = copy = self._look.copy(model)
        self._filled = self.outside = ""
        self.records: dict[str, list[_Record]] = {path: [] for path in leaves}
        self.changes: Attributes = {}
        args, kwargs = self._look.own_inputs((args, kwargs))
        with quietly(copy.root):  # which knows what hooks reach as long as they hang there
            apart = [copy.at(path) for path in leaves]
            reach = Reach(copy.root, without=apart) if leaves else None
            within = Reach(nn.ModuleList(apart)) if leaves else None
            self._held = list(_held_by_modules(copy)) if leaves else []
            generators = Generators(model) if leaves else None
            stubs = {path: _Stub(copy.at(path)) for path in leaves}
            for path, stub in stubs.items():
                stub.install(self._recording(path, stub))
            try:
                with self._look:
                    type(copy.root).forward(copy.root, *args, **kwargs)
            finally:
                for stub in stubs.values():
                    stub.end()
            changed = reach.changed() if reach else ""
            self.outside = self.outside or (within.changed() if within else "")
            self.outside = self.outside or (generators.advanced() if generators else "")
        if changed:
            raise CaptureError(f"a submodule that stays opaque may change {changed}, which the code around it uses")
        if self._filled:
            raise CaptureError(f"{self._filled} stays opaque, and changes a dict, list or dataclass that it was given")
        self.assigns = copy.changed_attributes()
        for path, names in self.changes.items():  # tensors that were edited are still the same
            self.assigns[path] = self.assigns.get(path, set()) | names

    def _note_print(self, *args: Any, **kwargs: Any) -> None:
        self.outside = "what is printed or logged"

    def _recording(self, path: str, stub: _Stub) -> Callable:
        def record(*args: Any, **kwargs: Any) -> Any:
            arguments, in_spec = trees.flatten((args, kwargs))
            tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
            state = [own for slot, _, own in self._copy.state if _is_within(slot.module, path)]
            held = [(own, (owner, name)) for own, owner, name in self._held if _is_within(owner, path)]
            edits = _Edits(self._look, [*tensors, *state, *(own for own, _ in held)])
            before = Before(self._copy)
            with printing(self._note_print):
                result = stub.call(*args, **kwargs)
            for owner, name in (*before.changed(), *(place for own, place in held if edits.reach(own))):
                self.changes.setdefault(owner, set()).add(name)
            given, spec = trees.flatten((args, kwargs))
            if spec != in_spec or any(a is not b for a, b in zip(given, arguments, strict=True)):
                self._filled = path
            values, out_spec = trees.flatten(result)
            written = frozenset(slot for slot, _, own in self._copy.state if edits.reach(own))
            own_edits = any(map(edits.reach, tensors))
            self.records[path].append(_Record(in_spec, out_spec, arguments, values, own_edits, written))
            return result

        return record


class _Edits:
    """What a call does to tensors: operators write to them, or NumPy does and `.data` is another one, which only the
    values of small ones tell.
    """

    def __init__(self, look: Look, tensors: Sequence[torch.Tensor]):
        self._look, self._start = look, len(look.log)
        small = (tensor for tensor in tensors if has_memory(tensor) and tensor.nbytes <= LARGE)
        self._values = {id(tensor): tensor.detach().clone() for tensor in small}

    def reach(self, tensor: torch.Tensor) -> bool:
        value = self._values.get(id(tensor))
        differs = value is not None and not torch.equal(tensor.detach(), value)
        return differs or self._look.writes(tensor, self._start)


def _is_within(path: str, leaf: str) -> bool:
    return f"{path}.".startswith(f"{leaf}.")


def _held_by_modules(copy: ModelCopy) -> Iterator[tuple[torch.Tensor, str, str]]:
    """The tensors of modules that are no state, with the path of the first module and the attribute."""
    modules = list(copy.modules())
    seen = {*(id(module) for _, module in modules), *(id(own) for _, _, own in copy.state)}
    for path, module in modules:
        for name in vars(module).keys() - vars(nn.Module()).keys():
            yield from ((value, path, name) for value in held_by(vars(module)[name], seen=seen) if has_memory(value))


class _Stub:
    """A copied module whose forward is another one, without hooks around it, until it is removed."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._own = {name: held for name, held in vars(module).items() if name in INSTALLED}
        self._stub: dict[str, Any] = {}

    def install(self, forward: Callable) -> None:
        self._stub = {"forward": forward, **{name: type(self._own[name])() for name in HOOKS}}
        vars(self._module).update(self._stub)

    def remove(self) -> None:
        vars(self._module).pop("forward")
        vars(self._module).update(self._own)

    def end(self) -> None:
        """Remove the stub for good, and drop its function, which holds the stub."""
        self.remove()
        self._stub.clear()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """The module itself, with its hooks."""
        self.remove()
        try:
            return self._module(*args, **kwargs)
        finally:
            vars(self._module).update(self._stub)


def _signatures(
    calls: list[_Record], again: list[_Record], assigned: frozenset[tuple[str, str]], outside: str
) -> list[Signature]:
    same = [(c.in_spec, c.out_spec) for c in calls] == [(c.in_spec, c.out_spec) for c in again]
    pairs = zip(calls, again, strict=True) if same else zip(calls, strict=True)
    return [
        Signature(
            runs[0].in_spec,
            runs[0].out_spec,
            tuple(_output(runs, i) for i in range(len(runs[0].values))),
            any(run.edits for run in runs),
            runs[0].state,
            frozenset((slot.module, slot.name) for slot in runs[0].state) | assigned,
            outside,
        )
        for runs in pairs
    ]


def _output(runs: Sequence[_Record], index: int) -> Output:
    value = runs[0].values[index]
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, CONSTANTS):
            raise CaptureError(f"a leaf returns a {type(value).__qualname__}, which is no pytree of tensors")
        return Output(constant=value)
    alike = next((i for i in range(len(runs[0].arguments)) if _is_alike(runs, index, i)), None)
    dims = tuple(_dim(runs, index, d) if alike is None else (alike, d) for d in range(value.ndim))
    return Output(dtype=value.dtype, device=value.device, dims=dims)


def _is_alike(runs: Sequence[_Record], index: int, argument: int) -> bool:
    """Whether a result has the shape of an argument, in all dims and runs, as those of norms and recurrent layers."""
    pairs = [(run.values[index], run.arguments[argument]) for run in runs]
    return all(isinstance(given, torch.Tensor) and value.shape == given.shape for value, given in pairs)


def _dim(runs: Sequence[_Record], index: int, d: int) -> int | tuple[int, int] | None:
    sizes = [run.values[index].shape[d] for run in runs]
    if len(runs) > 1 and sizes[0] == sizes[1]:
        return sizes[0]
    follows = [
        (i, j)
        for i, argument in enumerate(runs[0].arguments)
        if isinstance(argument, torch.Tensor)
        for j in range(argument.ndim)
        if (len(runs) > 1 or (d == 0) == (j == 0)) and [run.arguments[i].shape[j] for run in runs] == sizes
    ]
    if not follows and (len(runs) > 1 or d == 0):
        return None
    return min(follows, key=lambda source: abs(source[1] - d), default=sizes[0])
