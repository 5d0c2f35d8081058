"""A program compiled by AOTInductor, for C++."""

from __future__ import annotations

from pathlib import Path

from torch.export import ExportedProgram

from fxopt.kernels.libraries import c_shims
from fxopt.torch_internals.exporting import packaged


def package(program: ExportedProgram, path: str | Path) -> str:
    """The path of a package for ``torch::inductor::AOTIModelPackageLoader``, which calls the kernels directly.

    It needs the kernels in its process, as :func:`fxopt.export` says.

    Args:
        program: of :func:`fxopt.export`.
        path: of the package, a ``.pt2`` file.
    """
    return packaged(program, str(path), c_shims())
