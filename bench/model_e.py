"""RECom's model E by the convention of `python -m fxopt report bench/model_e.py`."""

from __future__ import annotations

from bench.models import E, Inputs, ManyColumns, ModelE, make_inputs


def build_model() -> ManyColumns:
    return ModelE()


def example_inputs(batch_size: int) -> Inputs:
    return make_inputs(E, batch_size)
