"""Kernels that cuda_call launches, run through the shim, with bugs planted that it must notice."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fxopt.kernels import cuda_build, cuda_call
from tests.cuda.shim_library import ShimError, compile_shim

MARGIN = 1 << 16  # floats behind a result, which bugs may write


def compiled(
    library: cuda_build.CudaLibrary, folder: Path, mutations: Mapping[str, tuple[str, str]], *mutated: str
) -> ctypes.CDLL:
    """A library for the shim with every bug planted and asleep.

    Args:
        mutations: what is wrong: what the source says, and what instead, with {} where the bug is awake.
        mutated: the sources one of which says so.
    """
    texts = {name: (Path(cuda_build.__file__).parent / name).read_text() for name in mutated}
    where = {old: next((name for name in mutated if old in texts[name]), mutated[0]) for old, _ in mutations.values()}
    source = planted(library, folder, {name: (where[old], old, new) for name, (old, new) in mutations.items()})
    return cuda_build.declared(library, compile_shim(folder, source, "-O1"))


def planted(library: cuda_build.CudaLibrary, folder: Path, mutations: Mapping[str, tuple[str, ...]]) -> Path:
    """A copy of a library's sources, as they lie, with bugs: what is wrong, in which file, what it says, what instead,
    and maybe more such pairs. The bugs are numbered from 1, as shim::planted counts them.
    """
    root = Path(cuda_build.__file__).parent
    for path in library.files:
        copy = folder / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    for number, (name, (file, *changes)) in enumerate(mutations.items(), 1):
        text = (folder / file).read_text()
        for old, new in zip(changes[::2], changes[1::2], strict=True):
            assert text.count(old) == 1, f"{file} no longer holds what the mutation {name!r} replaces"
            text = text.replace(old, new.replace("{}", f"(shim::planted == {number})"))
        (folder / file).write_text(text)
    return folder / library.source.relative_to(root)


@contextlib.contextmanager
def awake(library: ctypes.CDLL, mutations: Iterable[str], name: str) -> Iterator[None]:
    """One of a library's planted bugs is awake inside, all are asleep outside."""
    library.shim_plant(1 + list(mutations).index(name))
    try:
        yield
    finally:
        library.shim_plant(0)


def is_noticed(library: ctypes.CDLL, mutations: Iterable[str], name: str, agrees: Callable[[], bool]) -> bool:
    """Whether with one of its planted bugs the library does what no kernel may, or what it gives no longer agrees."""
    try:
        with awake(library, mutations, name):
            return not agrees()
    except ShimError:
        return True


@contextlib.contextmanager
def written_alone(*shapes: Sequence[int]) -> Iterator[list[Tensor]]:
    """Results for a kernel to write.

    Raises:
        ShimError: it also wrote behind one of them.
    """
    memory = [torch.full((math.prod(shape) + MARGIN,), 7.0) for shape in shapes]
    yield [each[:-MARGIN].view(*shape) for each, shape in zip(memory, shapes, strict=True)]
    if not all((each[-MARGIN:] == 7).all() for each in memory):
        raise ShimError("a write behind the result")


def run(library, function, parameters: bytes, tensors: Sequence[Tensor], dtype: torch.dtype, seed: int = 0) -> None:
    """Runs a library's function on tensors that it may read, and on memory that nobody named.

    Raises:
        ShimError: it read behind a tensor, or its threads raced.
    """
    named = [(ctypes.c_void_p(t.data_ptr()), ctypes.c_size_t(_extent(t))) for t in tensors if t.numel()]
    for at, size in named:
        library.shim_name(at, size)
    library.shim_seed(ctypes.c_uint64(seed))
    message = function(parameters, cuda_call.DTYPES[dtype], None)
    for at, _ in named:
        library.shim_forget(at)
    assert message is None, message
    text = ctypes.create_string_buffer(256)
    library.shim_problem(text)
    if text.value:
        raise ShimError(text.value.decode())


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to behind the last."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in strides)) * tensor.element_size()


def on_the_shim(
    monkeypatch: pytest.MonkeyPatch, library: ctypes.CDLL, tensors: Sequence[Tensor], seed: int = 0
) -> None:
    """From here on, what would launch a kernel on a GPU runs `library` instead, on `tensors`."""
    monkeypatch.setattr(cuda_call, "alike", lambda given: len({t.dtype for t in given if t is not None}) == 1)
    monkeypatch.setattr(cuda_build, "loaded", lambda kernel, device: library)
    monkeypatch.setattr(cuda_call, "launch", functools.partial(_launched, library, tensors, seed))


def _launched(library, tensors, seed, function, parameters, like):
    run(library, function, parameters, tensors, like.dtype, seed)
