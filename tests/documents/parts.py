"""The parts of the pages that are made from the code. `python -m tests.documents` makes them again.

A part stands between two comments that a reader does not see:

    <!-- made: rewrite views -->
    ...
    <!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("examples/*/README.md")), *PAGES]

_PART = re.compile(r"(<!-- made: (\w+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
Maker = Callable[[str], str]


def parts(text: str) -> list[tuple[str, str]]:
    """(kind, subject) of each part of a page, in order."""
    return [(kind, subject) for _, kind, subject, _ in _PART.findall(text)]


def refreshed(text: str, makers: Mapping[str, Maker]) -> str:
    """The page with each part made again, by the maker of its kind from its subject."""
    return _PART.sub(lambda part: f"{part[1]}\n{makers[part[2]](part[3]).strip()}\n\n{part[4]}", text)
