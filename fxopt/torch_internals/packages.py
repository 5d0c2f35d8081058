"""AOTInductor's packages, opened by the loader that C++ uses: torch's own door imports all of Inductor first, 2 s."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from torch._C._aoti import AOTIModelPackageLoader
from torch.utils import _pytree as pytree

_ANY_DEVICE = -1


class OpenPackage:
    """A package's function of flat tensors. torch calls it with the GIL held, so one runner is enough."""

    def __init__(self, path: Path) -> None:
        self._loader = AOTIModelPackageLoader(str(path), "model", False, 1, _ANY_DEVICE)
        self.takes, self.gives = map(pytree.treespec_loads, self._loader.get_call_spec())
        self.notes: dict[str, str] = self._loader.get_metadata()

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        return self._loader.boxed_run(tensors)
