"""A model while it is captured: other threads may train it, load other weights or switch it to evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxopt.runtime.executable import Executable
from fxopt.runtime.watch import Watch
from fxopt.torch_internals.storage import version_of


class NotNow(Exception):
    """A capture failed for a reason that may be gone at the next call: it says nothing about the model."""


class Moment:
    """The model when a capture began.

    Raises:
        NotNow: a lazy layer has no parameters yet.
    """

    def __init__(self, model: nn.Module) -> None:
        if any(is_lazy(tensor) for _, _, tensor in _tensors(model)):
            raise NotNow("not captured: a lazy layer gets its parameters from the first call")
        self.watch = Watch(model)
        self._model = model
        self._tensors = list(_tensors(model))
        self._versions = [version_of(tensor) for _, _, tensor in self._tensors]

    def spoiled(self, executable: Executable | None, stored: Mapping[nn.Module, set[str]]) -> bool:
        """Whether a change since then may be why there is no `executable`, or not all of it, or not of this model.

        stored: attributes that the capture assigns itself, by module.
        """
        now = {(id(module), name): tensor for module, name, tensor in _tensors(self._model)}
        replaced = {(id(m), name) for m, name, t in self._tensors if now.get((id(m), name)) is not t}
        if executable is None or any(ran.rolled_back for ran in executable.findings.passes):
            return bool(replaced) or self._edited() or not self.watch.holds()
        own = {(id(module), name) for module, names in stored.items() for name in names}
        read = {(id(self._model.get_submodule(s.module)), s.name) for s in executable.capture.state}
        return bool(replaced & read - own)

    def _edited(self) -> bool:
        return [version_of(tensor) for _, _, tensor in self._tensors] != self._versions


def _tensors(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for where in (module._parameters, module._buffers):
            yield from ((module, name, tensor) for name, tensor in where.items() if tensor is not None)
