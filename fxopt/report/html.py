"""A report as one page for a browser: its data, and the script that shows it, in a file that loads nothing else."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from fxopt.report.data import Report, SignatureReport
from fxopt.report.schema import dumped
from fxopt.report.text import headline
from fxopt.report.text.forms import in_letters, inputs

MOST_BYTES = 2_000_000  # of a page

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("elements.js", "units.js", "times.js", "graph.js", "tables.js", "roofline.js", "page.js")
_FEWEST_PARTS = 20  # of a block, where a page would be too large with all of them


def page(report: Report) -> str:
    """A page of at most 2 MB; where that takes it, blocks of many parts show some of them."""
    content = _content(report)
    most = max((len(block["parts"]) for block in _blocks(content)), default=0)
    while len(text := _page(report, content)) > MOST_BYTES and most > _FEWEST_PARTS:
        most //= 2
        for block in _blocks(content):
            del block["parts"][most:]
    return text


def _page(report: Report, content: dict[str, Any]) -> str:
    encoded = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": html.escape(f"fxopt report: {report.model}"),
        "style": _read("page.css"),
        "data": encoded,
        "script": "\n".join(map(_read, _SCRIPTS)),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _read("page.html"))


def _content(report: Report) -> dict[str, Any]:
    """The report's data as the script wants it: fewer digits, steps by number, and what the text report says."""
    content = _shorter(dumped(report))
    texts: dict[str, int] = {}
    for shown, found in zip(content["signatures"], report.signatures, strict=True):
        _told(shown, found)
    for block in _blocks(content):
        block["count"] = len(block["parts"])
        block["steps"] = [texts.setdefault(step, len(texts)) for step in block["steps"]]
    return content | {"texts": list(texts)}


def _told(shown: dict[str, Any], found: SignatureReport) -> None:
    shown["headline"], shown["inputs"] = headline(found), inputs(found.signature)
    for note in (
        note for ran in shown["passes"] for kind in ("changes", "misses", "rolled_back") for note in ran[kind]
    ):
        note["text"], note["why"] = (in_letters(note[key], found.signature) for key in ("text", "why"))
    for advice in shown["advice"]:
        advice["text"] = in_letters(advice["text"], found.signature)


def _blocks(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [block for found in content["signatures"] for side in ("before", "after") for block in found[side]]


def _shorter(value: Any) -> Any:
    """Floats with four digits."""
    if isinstance(value, dict):
        return {key: _shorter(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(_shorter, value))
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
