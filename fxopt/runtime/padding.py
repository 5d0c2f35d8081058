"""How a call's inputs are padded, so that one captured graph serves a bucket of batch sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from fxopt.capture.inputs import TensorSpec
from fxopt.kernels.stage import op as stage
from fxopt.patterns.row_wise import Rows

_FEWEST_IDS = 16  # of a jagged input's room, and a quarter more than it needs now: its count changes at each call


def bucket(n: int) -> int:
    """The capacity for n rows: 1, 2, 3, 4, 6, 8, 12, 16, 24... at most a half more than is needed."""
    power = 1 << max(0, n - 1).bit_length()
    return power * 3 // 4 if power >= 4 and n <= power * 3 // 4 else power


class Padding:
    """What a graph's inputs are padded with, and up to where.

    Attributes:
        ids: numbers of the inputs that have room for more ids than a call brings.

    Args:
        rows: how the placeholders depend on the batch.
        specs: the inputs, whose placeholders come behind `n_state` others.
    """

    def __init__(self, rows: Rows, specs: Sequence[TensorSpec], n_state: int) -> None:
        self._rows, self._specs, self._n_state = rows, specs, n_state
        self._fill = [self._filled(n_state + k) for k in range(len(specs))]
        self.ids = [placeholder - n_state for placeholder in rows.ids]
        self._sizes = [
            (k, d)
            for k, spec in enumerate(specs)
            for d, size in enumerate(spec.dims)
            if not isinstance(size, int) and (d > 0 or self._fill[k] is None)
        ]

    def _filled(self, placeholder: int) -> int | None:
        """What follows the rows of an input (stage.Room); None where it is not padded."""
        rows = self._rows
        if placeholder in rows.offsets:
            return rows.offsets[placeholder] - self._n_state
        if placeholder in rows.ids:
            return stage.ONES
        return stage.REPEAT if placeholder in rows.rows or placeholder in rows.last_offsets else None

    def batch(self, inputs: stage.Inputs) -> int:
        """The batch size of a call; 1 where rows may not be padded."""
        rows = self._rows
        if not rows.are_padded:
            return 1
        if rows.rows or rows.offsets:
            return inputs.rows(next(iter(rows.rows or rows.offsets)) - self._n_state)
        return inputs.rows(next(iter(rows.last_offsets)) - self._n_state) - 1

    def capacity(self, batch: int) -> int:
        """Rows of the padded batch, 0 where there is none."""
        return bucket(batch) if self._rows.are_padded else 0

    def sizes(self, inputs: Sequence[Tensor]) -> Iterator[int]:
        """Of a call's inputs what may differ and is not padded: each set takes a graph of its own."""
        return (inputs[k].shape[d] for k, d in self._sizes)

    def rooms(self, inputs: Sequence[Tensor], capacity: int, before: Sequence[int] | None) -> list[stage.Room]:
        """Static memory for inputs of these sizes. before: rows of each input in the graph that becomes too small."""
        rooms = []
        for k, (x, spec, fill) in enumerate(zip(inputs, self._specs, self._fill, strict=True)):
            shape, placeholder = list(x.shape), self._n_state + k
            if placeholder in self._rows.ids:
                wanted = bucket(max(_FEWEST_IDS, shape[0] + shape[0] // 4))
                shape[0] = max(wanted, before[k]) if before else wanted
            elif fill is not None:
                one_more = placeholder in self._rows.offsets or placeholder in self._rows.last_offsets
                shape[0] = capacity + one_more
            on_host = spec.device.type == "cpu"
            rooms.append(stage.Room(tuple(shape), x.dtype, on_host, stage.REPEAT if fill is None else fill))
        return rooms

    def has_room(self, inputs: stage.Inputs, capacities: Sequence[int]) -> bool:
        """Whether the ids of a call fit into a graph with these rows of each input; its batch and sizes do."""
        return all(inputs.rows(k) <= capacities[k] for k in self.ids)

    def rows_of(self, outputs: Sequence[Tensor]) -> Sequence[int]:
        """How many rows of each output a row of the batch has; 0: it is not padded."""
        return self._rows.outputs or [0] * len(outputs)

    def own_rows(self, outputs: Sequence[Tensor], batch: int) -> Iterator[Tensor]:
        """Views of padded outputs that hold the rows of the batch alone."""
        return (
            x.narrow(0, 0, batch * times) if times and len(x) != batch * times else x
            for x, times in zip(outputs, self.rows_of(outputs), strict=True)
        )
