"""What `python -m bench quick` and `python -m bench all` measure: a row a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.dense_models import Entry, entries, ids
from bench.large_models import DeepFM, DLRMv2, MixedColumns, TorchRecDLRM, dlrm_v2_inputs
from bench.models import E, F, ModelE, ModelF, make_inputs

BATCHES = (1, 256, 4096)  # of an entry that names none


@dataclass(frozen=True)
class Row:
    """A model and how it is measured.

    entry: of bench/dense_models.py or of a zoo.
    quick: the batch sizes of `quick`, () where it has not the time.
    cold: batch sizes that are also timed behind other work, which empties the caches.
    step: a batch size whose training step is timed as well.
    compiles: whether torch.compile takes seconds for it, or minutes.
    """

    entry: Any
    quick: tuple[int, ...] = ()
    cold: tuple[int, ...] = ()
    step: int | None = None
    compiles: bool = True

    def batches(self, quick: bool) -> tuple[int, ...]:
        return self.quick if quick else getattr(self.entry, "batches", BATCHES)


def rows() -> list[Row]:
    dense = {entry.name: entry for entry in entries()}
    wide = (1, 64, 256, 1024)
    e, e100, columns, f, mixed, dlrm_v2, deep_fm, torchrec = (
        Entry("E, 1000 columns", ModelE, lambda B, g: make_inputs(E, B), wide),
        Entry("E, 100 columns", lambda: ModelE(100), lambda B, g: make_inputs(E.scaled(100), B), wide),
        Entry("the columns of E", lambda: ModelE().columns.eval(), lambda B, g: make_inputs(E, B), (*wide, 4096)),
        Entry("F, 1200 columns", ModelF, lambda B, g: make_inputs(F, B), wide),
        Entry("1000 mixed columns", MixedColumns, MixedColumns.inputs, wide),
        Entry("MLPerf DLRM-v2", DLRMv2, dlrm_v2_inputs, wide),
        Entry("DeepFM", DeepFM, ids(26)),
        Entry("TorchRec DLRM", TorchRecDLRM.model, TorchRecDLRM.inputs, renew=TorchRecDLRM.fresh),
    )
    return [
        Row(e, quick=(1, 256), cold=(1, 256), compiles=False),
        Row(dense["DLRM"], quick=(1, 256), cold=(1,), step=1024),
        Row(dlrm_v2, quick=(1, 64), step=256),
        Row(torchrec, quick=(1, 256)),
        Row(dense["DIN"], quick=(1, 256)),
        Row(dense["MMoE"], quick=(1, 256)),
        Row(deep_fm, quick=(1, 256), step=1024),
        Row(columns, quick=(1, 256), cold=(1, 256), compiles=False),
        Row(e100),
        Row(mixed, compiles=False),
        Row(f, compiles=False),
        *(Row(dense[name]) for name in ("FiBiNET", "FFM", "ONN", "dot interaction")),
    ]
