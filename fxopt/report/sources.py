"""Lines of the user's own files that a report speaks of."""

from __future__ import annotations

import linecache

from fxopt.findings import Place

_AROUND = 2
_MOST = 500  # places


class Sources:
    """Collects the lines around places."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}

    def add(self, place: Place) -> None:
        if not place.path or (len(self._paths) >= _MOST and place.line not in self._paths):
            return
        if self._paths.setdefault(place.line, place.path) != place.path:
            self._paths[place.line] = ""  # two files of one name: none rather than the wrong one

    def lines(self) -> dict[str, str]:
        """By "file:line": "number  text" for the line and two on each side; what cannot be read is left out."""
        found = {line: _excerpt(path, int(line.rpartition(":")[2])) for line, path in self._paths.items() if path}
        return {line: text for line, text in found.items() if text}


def _excerpt(path: str, number: int) -> str:
    numbers = range(max(1, number - _AROUND), number + _AROUND + 1)
    lines = [(each, linecache.getline(path, each).rstrip()) for each in numbers]
    if not any(text for _, text in lines):
        return ""
    return "\n".join(f"{'>' if each == number else ' '}{each:5}  {text}" for each, text in lines)
