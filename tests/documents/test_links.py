"""The documents: links lead somewhere, files that are named exist, and every page is in an index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents.parts import DOCUMENTS, PAGES, ROOT

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"`((?:fxopt|tests|bench|examples|docs)/[\w./-]+)`")
PLACEHOLDER = re.compile(r"\b(test_)?x\b")  # patterns/x.py


def anchors(text: str) -> set[str]:
    """The names that headings have as targets of links."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(document: Path) -> list[str]:
    wrong = []
    text = document.read_text()
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            wrong.append(link)
    named = [name for name in FILE.findall(text) if not PLACEHOLDER.search(name)]
    return wrong + [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_it_points_to_exists(document: Path) -> None:
    assert not broken(document)


def test_the_index_has_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(index.read_text())}
    missing = [page for page in PAGES if page != index and page not in linked]
    assert not missing, "give the new page a line in docs/README.md"


def test_what_leads_nowhere_is_seen(tmp_path: Path) -> None:
    text = "# A page\n[b](b.md) [c](#c) [a](#a-page) `fxopt/nowhere.py` `fxopt/patterns/x.py`\n"
    (tmp_path / "a.md").write_text(text)
    assert broken(tmp_path / "a.md") == ["b.md", "#c", "fxopt/nowhere.py"]
