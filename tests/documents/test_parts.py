"""The parts of the pages that are made from the code are current, and nothing of the code is missing in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fxopt import __all__ as public
from fxopt.rewrites import PASSES
from tests.documents.__main__ import MAKERS
from tests.documents.parts import PAGES, ROOT, parts, refreshed
from tests.rewrites.test_catalogue import CATALOGUE

DOCS = ROOT / "docs"
_READ = re.compile(r"environ(?:\.get\(|\[)\"(\w+)\"|getenv\(\"(\w+)\"|\"(\w+)\", \"(\w+)\"\) if name in os\.environ")


def current(page: Path) -> bool:
    return refreshed(page.read_text(), MAKERS) == page.read_text()


@pytest.mark.parametrize("page", [page for page in PAGES if parts(page.read_text())], ids=lambda page: page.name)
def test_it_is_current(page: Path) -> None:
    made_with = re.search(r"made with torch\s+(\d+\.\d+)", page.read_text())
    if made_with and not torch.__version__.startswith(made_with[1]):
        pytest.skip(f"its operators have the names of torch {made_with[1]}")
    assert current(page), "python -m tests.documents makes it again"


def test_every_pass_has_its_section_in_the_order_of_passes() -> None:
    text = (DOCS / "rewrites.md").read_text()
    names = [each.name for each in PASSES]
    assert re.findall(r"^### `(\w+)`$", text, re.MULTILINE) == names
    assert [subject for _, subject in parts(text)] == [name for name in names if name in CATALOGUE]


def test_everything_public_is_in_the_reference() -> None:
    shown = {subject.partition("=")[0] for _, subject in parts((DOCS / "api.md").read_text())}
    missing = {name for name in public if not any(each.startswith(f"fxopt.{name}") for each in shown)}
    assert missing == {"Config"}, "it has a page of its own"


def test_every_environment_variable_is_named() -> None:
    text = (DOCS / "configuration.md").read_text()
    sources = [path for path in (ROOT / "fxopt").rglob("*") if path.suffix in {".py", ".h", ".cpp", ".cuh", ".cu"}]
    read = {name for path in sources for found in _READ.findall(path.read_text()) for name in found if name}
    read -= {"PATH"}
    named = set(re.findall(r"`([A-Z][A-Z_]{2,})`", text))
    assert {"FXOPT_CACHE", "FXOPT_ISA", "CXX"} <= read, "the search finds nothing"
    assert read <= named, f"docs/configuration.md does not name {read - named}"
    gone = {name for name in named - read if name.startswith("FXOPT_")}
    assert not gone, f"docs/configuration.md names {gone}, which nothing reads"


def test_a_stale_part_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = (DOCS / "configuration.md").read_text()
    page.write_text(text.replace("`'first'`", "`'last'`"))
    assert not current(page)
    assert parts("<!-- made: rewrite views -->\nold\n<!-- end -->") == [("rewrite", "views")]
