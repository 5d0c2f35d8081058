"""What a report says, from data made by hand."""

from __future__ import annotations

import json
import re

import pytest

from fxopt.findings import Change, Miss, Place
from fxopt.report.collect import notes
from fxopt.report.data import Machine, Measurement, Note, Pass, Report, SignatureReport, Spending, Tally
from fxopt.report.text import headline, inputs, plain
from fxopt.report.units import error, percent, seconds, times

COLUMNS = Pass(
    "embedding_columns",
    changes=(Note("26 columns into 1 tensor, one call", "same rows, same order", 1, Place("", "model.py:64")),),
    misses=(Note("its table is edited in place in forward", "", 880, Place("tables.0", "model.py:70")),),
    rolled_back=(Note("embedding_columns", "a tensor it reads may not move", 1, Place("side", "model.py:9")),),
)
SPENT = (Spending("embedding columns", 6e-4, 0.5, 4e-5), Spending("MLP", 6e-4, 0.5, 3.5e-4))
MEASURED = (
    Measurement(1, 1.2e-3, 3.9e-4, 3.08, (2.9, 3.2), 2.98e-8, "", SPENT),
    Measurement(256, 3.1e-3, 3.2e-3, 0.94, (0.9, 0.96), 0.0, "", SPENT),
    Measurement(4096, max_error=0.25, problem="differs from eager: output 0"),
)
FOUND = SignatureReport(
    signature="f32[B, 13], i64[B, 26]; eval",
    leaves=(Note("`if mask.any():`: depends on data", "", 1, Place("attention", "din.py:88")),),
    passes=(COLUMNS, Pass("dot_interaction")),
    operators_before=1297,
    operators_after=31,
    roles=(Tally("table lookups", 26, 1), Tally("checks of ids", 52, 0), Tally("everything else", 80, 30)),
    max_error=2.98e-8,
    graphs="no CUDA graphs: nvcc is not on PATH",
    seconds={"capture": 0.41, "rewrite": 0.12},
    measurements=MEASURED,
)
MACHINE = Machine("A CPU", 2, "2.13.0")


def report(*signatures: SignatureReport) -> Report:
    return Report("DLRM", MACHINE, signatures)


def words(text: str) -> str:
    """Without line breaks, so that wrapping does not matter."""
    return " ".join(text.split())


@pytest.fixture(params=[80, 120])
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(request.param))
    text = plain(report(FOUND))
    assert max(map(len, text.splitlines())) <= request.param
    assert "…" not in text
    return text


def test_headline_counts_and_gains() -> None:
    expected = "26 lookups in 1 call; 1,297 -> 31 operators; 3.1x at batch 1, 0.94x at batch 256"
    assert headline(FOUND) == expected


def test_operators_by_role(shown: str) -> None:
    assert "captured now table lookups 26 1 checks of ids 52 0 everything else 80 30" in re.sub(r"[\s─]+", " ", shown)


def test_headline_claims_no_gain_that_was_not_measured() -> None:
    assert headline(SignatureReport("f32[B]", operators_before=3, operators_after=3)) == "3 -> 3 operators"


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("f32[B, 13], i64[B, 26]; eval", "f32[B, 13], i64[B, 26]; eval"),
        ("f32[s1, 13], i64[s1], i64[s1], i64[s4], i64[s1]; eval", "f32[B, 13], 3 x i64[B], i64[L]; eval"),
        ("f32[s0, s0], " + ", ".join(f"i64[s{k}]" for k in range(1, 9)), "f32[B, B], 8 x i64[*]"),
        ("f32[], f32[2]", "f32[], f32[2]"),
        ("", ""),
    ],
)
def test_inputs_of_one_form_are_counted(signature: str, expected: str) -> None:
    assert inputs(signature) == expected


def test_everything_known_is_said(shown: str) -> None:
    text = words(shown)
    for part in (
        "f32[B, 13], i64[B, 26]; eval",
        "26 columns into 1 tensor, one call (model.py:64) safe: same rows, same order",
        "attention at din.py:88: `if mask.any():`: depends on data",
        "side at model.py:9: taken back: a tensor it reads may not move",
        "replayed no CUDA graphs: nvcc is not on PATH",
        "530 ms: capture 410 ms, rewrite 120 ms",
        "batch 4,096: differs from eager: output 0",
        "A CPU, 2 threads, torch 2.13.0",
    ):
        assert part in text


def test_alike_misses_are_one_line(shown: str) -> None:
    expected = "tables.0 at model.py:70 and 879 like it: its table is edited in place"
    assert expected in words(shown)


def test_what_became_one_spelling_is_counted_without_places() -> None:
    notes_ = (Note("cat of one", "nothing edits it", 2, Place("a")), Note("view", "of the same shape", 880, Place("b")))
    text = words(str(report(SignatureReport("f32[B]", passes=(Pass("normalize", notes_),)))))
    assert "normalize 880 x view: of the same shape 2 x cat of one: nothing edits it" in text
    assert "(b" not in text and "like it" not in text


def test_many_kinds_do_not_flood() -> None:
    kinds = tuple(Note(f"check {chr(65 + k)} removed", "dead", 10, Place("m")) for k in range(20))
    found = SignatureReport("f32[B]", passes=(Pass("dead_checks", changes=kinds, misses=kinds),))
    text = words(str(report(found)))
    assert text.count("8 more kinds in 80 places; --json has all") == 2
    assert "check L removed" in text and "check M removed" not in text
    assert report(found).to_json().count("check T removed") == 2


def test_sizes_are_letters() -> None:
    made = Note("arange: made once per size", "depends on s10 alone, not on s2", 1, Place("m"))
    found = SignatureReport("f32[s10, 4], f32[s10], f32[s2]; eval", passes=(Pass("sized_constants", (made,)),))
    text = words(str(report(found)))
    assert "f32[B, 4], f32[B], f32[L]; eval" in text and "depends on B alone, not on L" in text


def test_times_table(shown: str) -> None:
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.strip()}
    assert rows["256"] == ["3.10", "ms", "3.20", "ms", "0.94x", "0.90x", "to", "0.96x", "none"]
    assert rows["4,096"] == ["0.25"]


def test_spending_table_has_every_batch_that_was_measured(shown: str) -> None:
    assert shown.count("600 us     50%   40.0 us") == 2
    (total,) = (line.split() for line in shown.splitlines() if line.startswith("  whole call  "))
    assert total == ["whole", "call", *["1.20", "ms", "390", "us"] * 2]


def test_eager_model() -> None:
    text = words(str(report(SignatureReport("f32[B]", eager_reason="model.py:3: reads data"))))
    assert "Stays eager: nothing was changed" in text
    assert "the model model.py:3: reads data" in text


def test_nothing_captured() -> None:
    assert "Nothing captured yet" in str(report())


def test_two_signatures_are_told_apart() -> None:
    text = str(report(FOUND, FOUND))
    assert "Signature 1 of 2" in text and "Signature 2 of 2" in text


def test_json_holds_the_same_facts() -> None:
    data = json.loads(report(FOUND).to_json())
    assert data == json.loads(json.dumps(report(FOUND).to_dict()))
    assert data["signatures"][0]["measurements"][0]["spending"][1]["after"] == 3.5e-4
    assert data["signatures"][0]["passes"][0]["misses"][0]["first"] == {"module": "tables.0", "line": "model.py:70"}


def test_notes_group_by_all_but_names_and_numbers() -> None:
    misses = [Miss("columns", f"'add_{i}' is edited in place", Place(f"tables.{i}")) for i in range(3)]
    misses.append(Miss("columns", "its table is int8", Place("tables.3")))
    first, second = notes(misses)
    assert (first.text, first.count, first.first) == ("'add_0' is edited in place", 3, Place("tables.0"))
    assert (second.text, second.count) == ("its table is int8", 1)


def test_notes_keep_changes_apart_by_reason() -> None:
    reasons = ("same rows", "proved in range")
    changes = [Change(site="a", what="2 columns", why=why, place=Place(), number=0) for why in reasons]
    assert [note.why for note in notes(changes)] == ["same rows", "proved in range"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), (4.2e-7, "0.42 us"), (3.82e-5, "38.2 us"), (9.999e-4, "1.00 ms"), (0.99999, "1.0 s"), (75.0, "75.0 s")],
)
def test_seconds(value: float, expected: str) -> None:
    assert seconds(value) == expected


def test_other_units() -> None:
    assert [percent(x) for x in (0.0, 0.001, 0.5, 1.0)] == ["0%", "<1%", "50%", "100%"]
    assert [times(x) for x in (0.94, 0.999, 3.08, 12.4)] == ["0.94x", "1.0x", "3.1x", "12x"]
    assert [error(x) for x in (None, 0.0, 2.98e-8)] == ["", "none", "3e-08"]
