"""Third-party models: the same answers as eager at every batch size, with at most as many operators."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bench.verify import Judge
from fxopt.config import Config
from fxopt.optimize import optimize

ZOO = Path(__file__).resolve().parents[3] / "shared" / "zoo" / "zoo.py"
CAPTURED_AT, BATCHES = 64, (1, 3, 64, 200)
LIBRARIES = ("deepctr_torch", "torchfm", "torchrec")

pytestmark = pytest.mark.slow


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zoo", ZOO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zoo"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def _cases() -> Iterator[Any]:
    if not ZOO.exists():
        yield pytest.param(None, id="zoo", marks=pytest.mark.skip(reason=f"no models at {ZOO}"))
        return
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    for entry in _load().entries():
        absent = [name for name in missing if name.startswith(entry.library)]
        marks = [pytest.mark.skip(reason=f"needs {absent[0]}")] if absent else []
        yield pytest.param(entry, id=entry.name, marks=marks)


@pytest.fixture(scope="module")
def _earlier_tests_stay() -> None:
    """What they left is not looked through again behind each model: that would take 2 s a model."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _free(_earlier_tests_stay: None) -> Iterator[None]:
    """Tables of one model at a time."""
    yield
    gc.collect()


@pytest.mark.parametrize("entry", list(_cases()))
def test_model(entry: Any) -> None:
    model = entry.make_model()
    judge = Judge(model, entry.fresh)
    example = entry.make_inputs(CAPTURED_AT, 0, model)
    with torch.no_grad():
        fast = optimize(model, entry.fresh(example), Config(verify="off"))
        for batch in BATCHES:
            inputs = entry.make_inputs(batch, 1, model)
            try:
                expected = judge.expect(inputs)
            except Exception:  # a batch that the model itself does not accept
                continue
            expected.check(f"batch {batch}", fast(*entry.fresh(inputs)))
    entry._cache.clear()
    for findings in fast._fxopt.findings:  # type: ignore[union-attr]
        assert findings.operators_after <= findings.operators_before
