"""The reasons that docs/troubleshooting.md explains are those that fxopt gives."""

from __future__ import annotations

import re

from tests.documents.parts import ROOT

_ROW = re.compile(r"^\| ((?:`[^`]+`(?:, )?)+) \|", re.MULTILINE)
_JOINED = re.compile(r"[\"']\s*\n\s*f?[\"']")  # a string that goes on in the next line


def reasons(text: str) -> list[str]:
    """What each row of a page's tables begins with: pieces of a sentence, apart where "..." stands."""
    spans = [span for cells in _ROW.findall(text) for span in re.findall(r"`([^`]+)`", cells)]
    return [piece.strip() for span in spans for piece in span.split("...") if piece.strip()]


def test_every_reason_is_one_of_fxopt() -> None:
    found = reasons((ROOT / "docs" / "troubleshooting.md").read_text())
    said = "\n".join(_JOINED.sub("", path.read_text()) for path in sorted((ROOT / "fxopt").rglob("*.py")))
    assert len(found) > 12
    assert not [reason for reason in found if reason not in said]


def test_pieces_of_a_reason() -> None:
    assert reasons("| `a b`, `... c` | d `e` |\n|---|---|\n| f | `g` |") == ["a b", "c"]
