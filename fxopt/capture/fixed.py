"""Where a forward makes numbers of sizes, so that a graph serves no others: range(n), or NumPy's functions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import sympy

from fxopt.capture.inputs import Dim
from fxopt.capture.places import Places
from fxopt.findings import Miss, Place


class FixedSizes:
    """The first line that makes a number of each size. A symbol table calls it."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._lines: dict[str, Place] = {}

    def __call__(self, size: sympy.Expr) -> None:
        for symbol in size.free_symbols:
            if str(symbol) not in self._lines:
                self._lines[str(symbol)] = self._places.of_user()

    def told(
        self, static: Collection[Dim], varied: Collection[Dim], sources: Mapping[str, list[Dim]], names: Sequence[str]
    ) -> Iterator[Miss]:
        """What a report says of the `static` dims that have `varied`: for any other, one graph may be all there is."""
        for symbol, place in self._lines.items():
            if dims := [dim for dim in sources.get(symbol, ()) if dim in varied and dim in static]:
                size = f"{names[dims[0][0]]}.shape[{dims[0][1]}]"
                yield Miss("sizes", f"makes a number of {size}, so each size of it has a graph of its own", place)
