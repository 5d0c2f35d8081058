"""RECom's model F by the convention of `python -m fxopt report bench/model_f.py`."""

from __future__ import annotations

from bench.models import F, Inputs, ManyColumns, ModelF, make_inputs


def build_model() -> ManyColumns:
    return ModelF()


def example_inputs(batch_size: int) -> Inputs:
    return make_inputs(F, batch_size)
