"""Settings of the property tests."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _no_trace_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest would keep the trace records of every capture of a test: 1 MB a model, and a third of the time."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
