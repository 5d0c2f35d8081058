"""Two reports side by side."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from fxopt.report.data import Note, Pass, Report
from fxopt.report.diff import Diff
from tests.report.made import LINE, MACHINE, measured, report


def said(old: Report, new: Report) -> str:
    out = io.StringIO()
    Console(file=out, width=110, color_system=None).print(Diff(old, new))
    return " ".join(out.getvalue().split())


def changed(made: Report, **changes: object) -> Report:
    return replace(made, signatures=(replace(made.signatures[0], **changes),))  # type: ignore[arg-type]


def test_times_operators_and_rewrites() -> None:
    old = report()
    gone = tuple(replace(each, changes=()) for each in old.signatures[0].passes)
    fresh = (*gone, Pass("towers", changes=(Note("3 towers in one call", "", 1, LINE),)))
    faster = replace(measured(1), optimized=1.95e-4, speedup=6.0)
    text = said(old, changed(old, operators_after=40, passes=fresh, measurements=(faster,)))
    for part in (
        "operators per call 31 40",
        "fxopt 390 us 195 us -50%",
        "eager 1.20 ms 1.20 ms +0%",
        "speed-up 3.0x 6.0x",
        "gone embedding_columns: 26 columns in one call (tables.0 at model.py:64) views: view removed",
        "new towers: 3 towers in one call (tables.0 at model.py:64)",
    ):
        assert part in text
    assert "batch 256" not in text


def test_the_same_report_differs_in_nothing() -> None:
    text = said(report(), report())
    assert not [word for word in ("gone", "new ", "missed", "not measured alike", "only in") if word in text]


def test_what_makes_times_incomparable_is_said() -> None:
    text = said(report(), replace(report(training=True), machine=replace(MACHINE, threads=4)))
    assert "not measured alike: threads was 2 and is 4" in text
    assert "not measured alike: training was False and is True" in text


def test_signatures_are_matched_by_form() -> None:
    old = report()
    renamed = changed(old, signature="float32[s7, 13], int64[s7, 26]")
    assert "only in" not in said(old, renamed)
    other = said(old, changed(old, signature="float32[s7, 14]"))
    assert "only in the newer report" in other and "only in the older report" in other


def test_a_model_that_became_eager() -> None:
    text = said(report(), changed(report(), eager_reason="model.py:3: reads data", measurements=()))
    assert "eager now stays eager: model.py:3: reads data" in text
