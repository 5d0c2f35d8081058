"""Reports as JSON and back. A field that is gone or means something else gives the schema a new number."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from pathlib import Path
from typing import Any

from fxopt.findings import Place
from fxopt.report import data
from fxopt.report.data import Report

SCHEMA = "fxopt.report/1"


class NoReport(Exception):
    """A file or a dict that is no report of this schema; the message says what was expected, and where."""


def dumped(report: Report) -> dict[str, Any]:
    """The report as JSON has it: no tuples, keys that are strings, and None for what is no number."""
    return {"schema": SCHEMA, **_plain(report)}


def encoded(report: Report) -> str:
    return json.dumps(dumped(report), indent=1, allow_nan=False)


def load(path: Path) -> Report:
    """The report in a JSON file.

    Raises:
        NoReport: the file cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise NoReport(f"{path}: expected a report written by --json: {error}") from None
    try:
        return from_dict(found)
    except NoReport as error:
        raise NoReport(f"{path}: {error}") from None


def from_dict(found: Any) -> Report:
    """What :meth:`Report.to_dict` gave.

    Raises:
        NoReport: another schema, or a value of another type.
    """
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != SCHEMA:
        raise NoReport(f"expected a report of schema {SCHEMA!r}, found {schema!r}")
    return _read(Report, {key: value for key, value in found.items() if key != "schema"}, "report")


def _plain(value: Any) -> Any:
    if isinstance(value, Place):
        return {"module": value.module, "line": value.line}  # paths of files stay on their machine
    if dataclasses.is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _read(kind: Any, value: Any, where: str) -> Any:
    """`value`, as JSON gave it, as the type that a field names."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = next(each for each in arguments if each is not type(None))
        return None if value is None else _read(inner, value, where)
    if dataclasses.is_dataclass(kind):
        return _record(kind, _expected(dict, value, where), where)
    if origin is tuple:
        items = _expected(list, value, where)
        kinds = arguments[:1] * len(items) if arguments[-1] is ... else arguments
        if len(kinds) != len(items):
            raise NoReport(f"{where}: expected {len(kinds)} items, found {len(items)}")
        return tuple(
            _read(each, item, f"{where}[{n}]") for n, (each, item) in enumerate(zip(kinds, items, strict=True))
        )
    if origin is dict:
        of_key, of_value = arguments
        items = _expected(dict, value, where).items()
        return {of_key(key): _read(of_value, item, f"{where}.{key}") for key, item in items}
    return float(_expected((int, float), value, where)) if kind is float else _expected(kind, value, where)


def _record(kind: Any, found: dict[str, Any], where: str) -> Any:
    """A dataclass; a field that is missing has its default."""
    names = typing.get_type_hints(kind, vars(data))
    try:
        return kind(**{name: _read(names[name], value, f"{where}.{name}") for name, value in found.items()})
    except (KeyError, TypeError, ValueError) as error:
        raise NoReport(f"{where}: expected the fields {', '.join(names)}; {error}") from None


def _expected(kind: Any, value: Any, where: str) -> Any:
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, kind):
        wanted = " or ".join(each.__name__ for each in (kind if isinstance(kind, tuple) else (kind,)))
        raise NoReport(f"{where}: expected {wanted}, found {value!r:.40}")
    return value
