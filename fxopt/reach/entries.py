"""Entries, attributes, cells and context variables, all read as where[key]."""

from __future__ import annotations

import types
from contextvars import ContextVar
from typing import Any

MISSING = object()


def content_of(cell: types.CellType) -> Any:
    """What a variable of a closure holds; MISSING where nothing is assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def item(where: Any, key: Any) -> Any:
    """What stands at ``where[key]``, whatever a subclass of dict or list gives for it; of a function its attribute, and
    of a cell what it holds, None where nothing is assigned yet."""
    if isinstance(where, dict):
        if (value := dict.get(where, key, MISSING)) is MISSING:
            raise KeyError(key)
        return value
    if isinstance(where, list):
        return list.__getitem__(where, key)
    if isinstance(where, types.FunctionType):
        return getattr(where, key)
    if isinstance(where, types.CellType):
        return None if (value := content_of(where)) is MISSING else value
    return where[key]


class Absent:
    """What may get a name that it has not, read as absent[name]."""

    def __init__(self, where: dict[str, Any]) -> None:
        self._where = where

    def __getitem__(self, name: str) -> Any:
        return self._where.get(name, MISSING)


class Fields:
    """The slots of an object, read as fields[name]."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None


class Variable:
    """A context variable, read as variable[name]."""

    def __init__(self, variable: ContextVar) -> None:
        self._variable = variable

    def __getitem__(self, name: str) -> Any:
        return self._variable.get(None)
