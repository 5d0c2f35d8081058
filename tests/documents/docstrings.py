"""Docstrings as Markdown: a signature, the text, and lists of arguments, results and errors."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from fxopt import Config

_HEADINGS = ("Args", "Returns", "Raises", "Attributes")
_ROLE = re.compile(r":(?:func|class|mod):`([^`]+)`")
_WIDEST = 100


def reference(path: str) -> str:
    """A section of the reference. "fxopt.optimize=fxopt.optimize.optimize": shown by the first name, found by the
    second."""
    shown, _, defined = path.rpartition("=")
    it = _found(defined)
    parts = [f"### `{shown or defined}`", *_signature(shown or defined, it)]
    parts += [_section(part) for part in _sections(inspect.getdoc(it) or "")]
    return "\n\n".join([*parts, *_methods(it)])


def _found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _signature(name: str, it: Any) -> Iterator[str]:
    """How it is called; nothing for what a user does not make."""
    if dataclasses.is_dataclass(it) or (isinstance(it, type) and issubclass(it, Exception)):
        return
    signature = inspect.signature(it)
    said = [
        each.replace(default=_default(each), annotation=_Said(each.annotation))
        for each in signature.parameters.values()
    ]
    whole = str(signature.replace(parameters=said, return_annotation=_Said(signature.return_annotation)))
    if len(whole) > _WIDEST:
        inside, _, returns = whole[1:].rpartition(")")
        arguments = re.sub(r", (?=\*,|\w+:)", ",\n    ", inside)
        whole = f"(\n    {arguments},\n){returns}"
    yield f"```text\n{name}{whole}\n```"


class _Said:
    """An annotation or a default as the source has it."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def __repr__(self) -> str:
        return str(self.what)


def _default(parameter: inspect.Parameter) -> Any:
    """The default; what is an object is named by its class."""
    default = parameter.default
    known = default is inspect.Parameter.empty or isinstance(default, str | int | float | tuple | None)
    return default if known else _Said("Config()" if isinstance(default, Config) else "...")


def _methods(it: Any) -> Iterator[str]:
    """What a dataclass can be asked for."""
    if dataclasses.is_dataclass(it):
        public = {name: method for name, method in vars(it).items() if name[0] != "_" and inspect.isfunction(method)}
        lines = [f"- `{name}()`: {_plain(inspect.getdoc(method) or '')}" for name, method in public.items()]
        yield "**Methods.**\n\n" + "\n".join(lines)


def options(_: str) -> str:
    """Config's fields: a row each, with the default and what the docstring says."""
    texts = dict(_entries(dict(_sections(inspect.getdoc(Config) or ""))["Args"]))
    rows = [f"| `{f.name}` | `{f.default!r}` | {texts[f.name]} |" for f in dataclasses.fields(Config)]
    return "\n".join(["| option | default | what it does |", "|---|---|---|", *rows])


def _sections(doc: str) -> list[tuple[str, str]]:
    """("", text) and (heading, its lines) in order."""
    parts = re.split(rf"^({'|'.join(_HEADINGS)}):\n", doc, flags=re.MULTILINE)
    named = zip(parts[1::2], (textwrap.dedent(part).strip("\n") for part in parts[2::2]), strict=True)
    return [("", parts[0].strip()), *named]


def _section(part: tuple[str, str]) -> str:
    heading, text = part
    if heading in ("", "Returns"):
        return _plain(f"**Returns.** {text}" if heading else text)
    return f"**{heading}.**\n\n" + "\n".join(f"- `{name}`: {what}" for name, what in _entries(text))


def _entries(text: str) -> list[tuple[str, str]]:
    """("name", "what it is") of each "name: what it is", which may go on over indented lines."""
    joined = re.sub(r"\n +", " ", text)
    return [(name, _plain(what)) for name, _, what in (line.partition(": ") for line in joined.splitlines() if line)]


def _plain(text: str) -> str:
    """Markdown in place of Sphinx's markup; code that is indented stays code."""
    return re.sub(r"\[([A-Z]+(?:, [A-Z]+)*)\]", r"\\[\1\\]", _ROLE.sub(r"`\1`", text).replace("``", "`"))
