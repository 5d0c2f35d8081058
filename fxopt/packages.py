"""A package of :func:`fxopt.export.package` as a function, in a process that imports nothing else of fxopt."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxopt import trees
from fxopt.torch_internals.packages import OpenPackage

NOTE = "fxopt.inputs.1"  # of a package: its Inputs, as JSON in this form
FRONT, MANIFEST = "libfxopt.so", "manifest.json"  # of a folder of kernels
_MOST_KNOWN = 1024  # forms of calls that are remembered
_BAD_ID = re.compile(
    r"fxopt-bad-id column=\d+ row=(?P<row>\d+) lane=\d+ value=(?P<id>-?\d+) rows=(?P<rows>\d+)"
    r" name='(?P<column>.*?)' table='(?P<table>.*)'"
)
_RELATION = re.compile(r"Expected (.+) to be True but received")


class Size(NamedTuple):
    """multiplier * symbol + added; sizes with one symbol belong together."""

    symbol: str
    multiplier: int
    added: int

    def at(self, value: int) -> int:
        return self.multiplier * value + self.added


class Input(NamedTuple):
    """A leaf of the arguments. sizes: None of a leaf that is no tensor, which must be `value`."""

    name: str
    value: Any = None
    dtype: str = ""
    device: str = ""
    sizes: Sequence[int | Size] | None = None

    @property
    def form(self) -> str:
        if self.sizes is None:
            return repr(self.value)
        return f"{self.dtype} on {self.device} of {len(self.sizes)} dimensions"


class Inputs(NamedTuple):
    """All leaves. ranges: the least and the greatest value of symbols; None: no greatest."""

    leaves: list[Input]
    ranges: Mapping[str, tuple[int, int | None]]

    def text(self) -> str:
        return json.dumps(self)

    @staticmethod
    def of(text: str) -> Inputs:
        leaves, ranges = json.loads(text)
        read = [Input(name, value, dtype, device, _sizes(sizes)) for name, value, dtype, device, sizes in leaves]
        return Inputs(read, ranges)

    def legend(self, text: str) -> str:
        """Where the symbols of a text come from."""
        named: dict[str, str] = {}
        for leaf in self.leaves:
            for axis, size in enumerate(leaf.sizes or ()):
                if isinstance(size, Size) and size.at(1) == 1 and re.search(rf"\b{re.escape(size.symbol)}\b", text):
                    named.setdefault(size.symbol, f"{size.symbol} is dimension {axis} of input {leaf.name}")
        return ", ".join(named.values())

    def check(self, found: Sequence[Any]) -> None:
        """
        Raises:
            TypeError, ValueError: a leaf is another one, as Package says.
        """
        values: dict[str, int] = {}
        for expected, leaf in zip(self.leaves, found, strict=True):
            if form_of(leaf) != expected.form:
                raise TypeError(f"input {expected.name}: expected {expected.form}, found {form_of(leaf)}")
            for axis, size in enumerate(expected.sizes or ()):
                self._check_size(f"input {expected.name}, dimension {axis}", size, leaf.shape[axis], values)

    def _check_size(self, place: str, expected: int | Size, found: int, values: dict[str, int]) -> None:
        if isinstance(expected, int):
            if found != expected:
                raise ValueError(f"{place}: expected the size {expected}, found {found}")
            return
        value, rest = divmod(found - expected.added, expected.multiplier)
        wanted = values.setdefault(expected.symbol, value)
        if rest or value != wanted:
            raise ValueError(f"{place}: expected {expected.at(wanted)}, found {found}")
        least, most = self.ranges.get(expected.symbol, (0, None))
        if value < least or (most is not None and value > most):
            limit = "" if most is None else f" and at most {expected.at(most)}"
            raise ValueError(f"{place}: expected at least {expected.at(least)}{limit}, found {found}")


def _sizes(read: Sequence[Any] | None) -> list[int | Size] | None:
    return None if read is None else [size if isinstance(size, int) else Size(*size) for size in read]


def form_of(leaf: Any) -> str:
    """What Input.form says, of a leaf that was found."""
    if isinstance(leaf, Tensor):
        if not trees.is_dense(leaf):
            return f"{type(leaf).__name__}, {leaf.layout}"
        return f"{str(leaf.dtype).removeprefix('torch.')} on {leaf.device.type} of {leaf.dim()} dimensions"
    return repr(leaf) if isinstance(leaf, str | int | float | None) else type(leaf).__name__


class Package:
    """Answers as the exported model does, without gradients. A Python number that the model returns is a tensor here.

    Arguments are given as they were for the export, also those that have a default. Those that are no tensors must have
    the values that they had. Threads that call a package take turns, because torch holds the GIL.

    Raises:
        TypeError: arguments have another structure, dtype, device or number of dimensions than those of the export.
        ValueError: the package was not made for a size, or sizes do not belong together.
        IndexError: an id is outside its table; the text names the column, the table, the id and where it is.
    """

    def __init__(self, opened: OpenPackage) -> None:
        self._opened = opened
        self._inputs = Inputs.of(opened.notes[NOTE])
        self._known = set[tuple]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            leaves = self._opened.takes.flatten_up_to((args, kwargs))
        except ValueError as error:
            raise TypeError(f"expected the arguments of the export: {error}") from error
        form = tuple(
            [(type(v), v.layout, v.dtype, v.device, v.shape) if isinstance(v, Tensor) else repr(v) for v in leaves]
        )
        if form not in self._known:
            self._inputs.check(leaves)
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            self._known.add(form)
        try:
            with torch.no_grad():
                results = self._opened([leaf.resolve_neg().contiguous() for leaf in leaves if isinstance(leaf, Tensor)])
        except RuntimeError as error:
            raise self._explained(error) from None
        return self._opened.gives.unflatten(results)

    def _explained(self, error: RuntimeError) -> Exception:
        text = str(error)
        if found := _BAD_ID.search(text):
            said = "{column}: id {id} at row {row} is outside table {table!r} with {rows} rows"
            return IndexError(said.format(**found.groupdict()))
        if found := _RELATION.search(text):
            return ValueError(f"sizes do not belong together: expected {found[1]}, where {self._inputs.legend(text)}")
        return error


def load(package: str | Path, kernels: str | Path) -> Package:
    """A package as a function. Nothing is traced, so its process starts about as fast as one that only imports torch.

    Args:
        package: a file that :func:`fxopt.export.package`, or ``python -m fxopt export --package``, has written.
        kernels: the folder that ``python -m fxopt build --bundle`` has written, with the same torch.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: the kernels are for another torch or processor, or this version of fxopt has not made the package.
    """
    package, kernels = Path(package), Path(kernels)
    if not package.is_file():
        raise FileNotFoundError(f"no package at {package}")
    manifest = json.loads((kernels / MANIFEST).read_text())
    for what, here in ("torch", torch.__version__), ("machine", platform.machine()):
        if manifest[what] != here:
            raise ValueError(f"{kernels}: expected kernels for {what} {here}, found {manifest[what]}")
    torch.ops.load_library(str(kernels / FRONT))
    try:
        opened = OpenPackage(package)
    except RuntimeError as error:
        raise ValueError(f"{package}: expected a package of fxopt.export.package: {error}") from error
    if NOTE not in opened.notes:
        raise ValueError(f"{package}: expected a package that this version of fxopt has made: export it again")
    return Package(opened)
