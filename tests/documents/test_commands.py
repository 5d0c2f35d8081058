"""The shell commands that the pages show exist, with their options, targets and files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents.commands import commands, wrong
from tests.documents.parts import DOCUMENTS, ROOT

OPTION = re.compile(r"add_argument\([^)]*?\"(--[a-z-]+)\"")


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_commands_exist(page: Path) -> None:
    found = (wrong(command, whole, page.parent) for command, whole in commands(page.read_text()))
    assert not [problem for problem in found if problem]


def test_options_that_a_sentence_names_exist() -> None:
    places = [ROOT / "fxopt" / "cli", ROOT / "bench", ROOT / "examples", ROOT / "tests"]
    known = {option for place in places for path in place.rglob("*.py") for option in OPTION.findall(path.read_text())}
    named = {option for page in DOCUMENTS for option in re.findall(r"`(--[a-z-]+)", page.read_text())}
    assert {"--html", "--train"} <= named
    assert not named - known


def test_what_does_not_exist_is_named() -> None:
    page = (
        "    python -m fxopt report model.py --htlm a.html\n    make coffee\n    python train.py --fast\n"
        "    python -m fxopt report --batch 1   # no file\n    torchrun --nproc-per-node 2 nowhere.py\n"
        "`python -m fxopt report`, `python -m fxopt brew` and `python -m bench dens`, or `python -m\ntests.nothing`"
    )
    folder = ROOT / "examples" / "dlrm"
    found = [wrong(command, whole, folder) for command, whole in commands(page)]
    expected = ["--htlm", "no such target", "no option --fast", "are required", "no such file"]
    expected += ["", "invalid choice", "no such benchmark", "no such module"]
    assert len(found) == len(expected)
    assert all(part in problem and bool(part) == bool(problem) for part, problem in zip(expected, found, strict=True))
