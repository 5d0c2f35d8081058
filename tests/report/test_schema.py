"""Reports as JSON, and back."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fxopt.findings import Place
from fxopt.report import data
from fxopt.report.data import Machine, Report
from fxopt.report.schema import SCHEMA, NoReport, from_dict, load
from tests.report.made import report

ROOT = Path(__file__).resolve().parents[2]


def test_there_and_back() -> None:
    made = report(training=True)
    found = from_dict(json.loads(made.to_json()))
    assert found == made
    assert found.to_dict() == made.to_dict()


def test_json_is_plain_and_names_its_schema() -> None:
    found = report().to_dict()
    assert found["schema"] == SCHEMA == "fxopt.report/1"
    assert json.loads(json.dumps(found)) == found
    assert found["signatures"][0]["advice"][0]["place"] == {"module": "tables.0", "line": "model.py:64"}


def test_paths_of_this_machine_and_what_is_no_number_stay_here() -> None:
    place = Place("a", "model.py:1", "/somewhere/model.py")
    made = data.Advice("text", math.inf, 1, place)
    found = Report("M", Machine("c", 1, "2"), (data.SignatureReport("", advice=(made,)),)).to_json()
    assert "somewhere" not in found
    assert json.loads(found)["signatures"][0]["advice"][0]["gain"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.pop("schema"), "expected a report of schema 'fxopt.report/1', found None"),
        (lambda found: found.update(schema="fxopt.report/9"), "found 'fxopt.report/9'"),
        (lambda found: found.update(model=3), "report.model: expected str, found 3"),
        (lambda found: found.update(extra=3), "report: expected the fields model, machine"),
        (lambda found: found.pop("model"), "report: expected the fields model, machine"),
        (lambda found: found["machine"].update(threads="2"), "report.machine.threads: expected int, found '2'"),
        (lambda found: found["machine"].update(threads=True), "report.machine.threads: expected int, found True"),
        (lambda found: found.update(signatures={}), "report.signatures: expected list, found {}"),
        (
            lambda found: found["signatures"][0]["measurements"][0].update(quartiles=[1.0]),
            "report.signatures[0].measurements[0].quartiles: expected 2 items, found 1",
        ),
        (
            lambda found: found["signatures"][0]["before"][0].update(seconds={"many": 1.0}),
            "report.signatures[0].before[0]: expected the fields kind",
        ),
    ],
)
def test_what_is_no_report(change: Any, message: str) -> None:
    found = json.loads(report().to_json())
    change(found)
    with pytest.raises(NoReport, match=re.escape(message)):
        from_dict(found)


@pytest.mark.parametrize("content", [None, "", "[]", "{}", "nothing"])
def test_files_that_hold_no_report(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(NoReport, match=r"report\.json: expected a report"):
        load(path)


def test_every_field_is_documented() -> None:
    text = (ROOT / "docs/report.md").read_text()
    classes = [each for each in vars(data).values() if dataclasses.is_dataclass(each) and each is not Place]
    names = {each.name for one in classes for each in dataclasses.fields(one)}  # type: ignore[arg-type]
    assert names and not [name for name in sorted(names) if f"`{name}`" not in text]
    assert SCHEMA in text
