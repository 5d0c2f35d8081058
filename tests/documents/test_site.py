"""The documents build as a site without a network and without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents.parts import ROOT

EXTERNAL = re.compile(r"<(?:script|link|img)[^>]+(?:src|href)=\"(?:https?:)?//[^\"]+\"")


def test_it_builds_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (pip install '.[docs]')")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "site/mkdocs.yml", "-d"]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    pages = list(tmp_path.rglob("*.html"))
    assert (tmp_path / "docs" / "rewrites.html") in pages
    assert not [found for page in pages for found in EXTERNAL.findall(page.read_text())]


def test_its_pages_are_links_to_the_documents() -> None:
    """A link keeps its place relative to the others, so that links between documents lead somewhere in both."""
    links = [path for path in (ROOT / "site" / "pages").rglob("*") if path.is_symlink()]
    pages = ROOT / "site" / "pages"
    assert links and all(path.resolve() == ROOT / path.relative_to(pages) for path in links)
    assert {path.name for path in ROOT.glob("*.md")} <= {path.name for path in pages.iterdir()}
