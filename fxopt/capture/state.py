"""Parameters and buffers as inputs, and a copy of the module tree to trace on.

The user's modules may be serving other threads while we trace: nothing here writes to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fxopt import trees
from fxopt.capture.errors import CaptureError
from fxopt.capture.mirror import Mirror
from fxopt.findings import Place
from fxopt.torch_internals.fake_tensors import FakeTensorMode, as_parameter
from fxopt.torch_internals.hooks import COMPILED, around_every_forward


@dataclass(frozen=True)
class StateSlot:
    """A tensor of the model: model.get_submodule(module)._parameters[name] or ._buffers[name]."""

    module: str
    name: str
    kind: str

    def read(self, model: nn.Module) -> torch.Tensor:
        owner = model.get_submodule(self.module)
        return (owner._parameters if self.kind == "parameter" else owner._buffers)[self.name]  # type: ignore[return-value]

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.module else self.name


def of_other_kinds(path: str, module: nn.Module) -> str:
    """What the module itself holds that no graph can read: subclasses of a library's own, and sparse parameters."""
    for kind, store in (("parameter", module._parameters), ("buffer", module._buffers)):
        for name, tensor in store.items():
            if tensor is not None and not trees.is_dense(tensor) and not _is_constant(kind, tensor):
                return _refusal(StateSlot(path, name, kind), tensor)
    return ""


def _is_constant(kind: str, tensor: torch.Tensor) -> bool:
    """A sparse buffer, such as the edges of a graph of users and items: a graph reads it as it is now."""
    return kind == "buffer" and type(tensor) is torch.Tensor and tensor.layout is torch.sparse_coo


def _refusal(slot: StateSlot, tensor: torch.Tensor) -> str:
    kind = type(tensor).__qualname__ if tensor.layout is torch.strided else tensor.layout
    return f"{slot}: expected a dense tensor, found {kind}"


def hooks_of(modules: Iterable[nn.Module]) -> list[Callable]:
    """The functions that run around the forwards of these modules."""
    own = (hook for m in modules for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()))
    return [*own, *around_every_forward()]


class ModelCopy(Mirror):
    """New module objects around copies of what the modules hold, with tensors of the state replaced.

    Args:
        model: left untouched.
        swap: the replacement of a parameter or buffer (fake for tracing, memory of its own for a trial run).
        hold: the replacement of any other tensor; by default it stays the same.

    Attributes:
        root: the copy. paths: id of each copied module to its path.
        state: slot, tensor and replacement of what was replaced, in order, tied tensors once.
    """

    def __init__(
        self,
        model: nn.Module,
        swap: Callable[[torch.Tensor, StateSlot], torch.Tensor],
        hold: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ):
        super().__init__(hold)
        self._model = model
        self._swap = swap
        self.originals: dict[int, nn.Module] = {}
        self.paths: dict[int, str] = {}
        self.state: list[tuple[StateSlot, torch.Tensor, torch.Tensor]] = []
        for path, module in model.named_modules():
            self._memo[id(module)] = copy = object.__new__(type(module))
            self._parts.add(id(module))
            self.paths[id(copy)] = path
            self.originals[id(copy)] = module
        for path, module in model.named_modules():
            self._tensors(path, module)
        for module in model.modules():
            self.fill(module, copy := self._memo[id(module)])
            vars(copy).pop(COMPILED, None)
        self.root: nn.Module = self._memo[id(model)]

    def _tensors(self, path: str, module: nn.Module) -> None:
        for kind, store in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in store.items():
                if tensor is not None and id(tensor) not in self._memo:
                    slot = StateSlot(path, name, kind)
                    self._memo[id(tensor)] = new = self._swap(tensor, slot)
                    if new is not tensor:
                        self.state.append((slot, tensor, new))

    def at(self, path: str) -> nn.Module:
        """The copy of the submodule at `path`."""
        return self._memo[id(self._model.get_submodule(path))]

    def of(self, module: nn.Module) -> nn.Module:
        """The copy of a module of the tree."""
        return self._memo[id(module)]

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Each copied module, with its path."""
        return ((self.paths[id(copy)], copy) for copy in map(self.of, self.originals.values()))

    def forget(self) -> None:
        """Remove the forwards that a capture gave to its modules. They hold this copy, which would stay in a cycle."""
        for _, copy in self.modules():
            vars(copy).pop("forward", None)

    def changed_attributes(self) -> dict[str, set[str]]:
        """Path of each module whose forward changed attributes or buffers, and their names."""
        changed = {self.paths[copy_id]: self.changes(module) for copy_id, module in self.originals.items()}
        return {path: names for path, names in changed.items() if names}

    def changes(self, module: nn.Module) -> set[str]:
        """The names of a module's attributes and buffers that are others in its copy."""
        before, after = module.__dict__, self.of(module).__dict__
        names = {name for name in after.keys() | before.keys() if not self._same_item(name, before, after)}
        names -= {"_written", COMPILED}
        if "_buffers" in names:
            old, new = module._buffers, self.of(module)._buffers
            changed_buffers = {name for name in old.keys() | new.keys() if not self._same_item(name, old, new)}
            names = names - {"_buffers"} | (changed_buffers if old.keys() == new.keys() else {"_buffers"})
        return names

    def _same_item(self, name: str, before: dict, after: dict) -> bool:
        return name in before and name in after and self.same(before[name], after[name])


def fake_state(
    fake_mode: FakeTensorMode, within_leaf: Callable[[str], bool]
) -> Callable[[torch.Tensor, StateSlot], torch.Tensor]:
    """Fakes with the tensor's own sizes and strides, static. Leaves may have tensors of any kind."""

    def fake(real: torch.Tensor, slot: StateSlot) -> torch.Tensor:
        if not trees.is_dense(real):
            if within_leaf(slot.module) or _is_constant(slot.kind, real):
                return real
            raise CaptureError(_refusal(slot, real), Place(slot.module))
        with fake_mode:
            new = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)
        new.requires_grad_(real.requires_grad)
        if slot.kind == "parameter":
            as_parameter(new)
        vars(new).update({name: value for name, value in vars(real).items() if name not in vars(new)})
        return new

    return fake


def label(gm: torch.fx.GraphModule, slots: Sequence[StateSlot], names: tuple[str, ...]) -> tuple[StateSlot, ...]:
    """Tell placeholders apart, and drop those of unused state."""
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    used = []
    for node, slot in zip(placeholders, slots, strict=False):
        node.meta["state"] = slot
        if node.users:
            used.append(slot)
        else:
            gm.graph.erase_node(node)
    for node, name in zip(placeholders[len(slots) :], names, strict=True):
        node.meta["input"] = name
    gm.recompile()
    return tuple(used)
