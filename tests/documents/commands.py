"""The shell commands that the pages show, checked without running them."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.__main__ import BENCHMARKS
from fxopt.cli import parser as fxopt_parser
from tests.documents.parts import ROOT

_SHOWN = re.compile(r"^ {3,}(?:\.venv/bin/)?((?:make|python|torchrun) [^\n]*)$", re.MULTILINE)  # a line of a block
_NAMED = re.compile(r"`(?:\.venv/bin/)?((?:make|python -m|torchrun)\s[^`]*)`")
_UNFINISHED = re.compile(r"are required|expected (one|at least one) argument")


def commands(text: str) -> Iterator[tuple[str, bool]]:
    """(command, whether it is whole) of a page: the lines of its blocks are, and what a sentence names need not be."""
    yield from ((found, True) for found in _SHOWN.findall(text))
    yield from ((" ".join(found.split()), False) for found in _NAMED.findall(text))


def wrong(command: str, whole: bool, folder: Path) -> str:
    """What would not work about a command, "" if all is well. folder: of the page, where scripts may be."""
    program, *words = shlex.split(command, comments=True)
    if program == "make":
        known = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return "" if words and words[0] in known else f"{command}: no such target"
    if program == "torchrun":
        words = words[words.index("--nproc-per-node") + 2 :]
    if words[0] != "-m":
        return _script(command, words, folder)
    _, module, *words = words
    if module == "fxopt":
        return _parsed(command, fxopt_parser().parse_args, words, whole)
    if module == "bench":
        return _bench(command, words, whole)
    return "" if importlib.util.find_spec(module) else f"{command}: no such module"


def _bench(command: str, words: Sequence[str], whole: bool) -> str:
    if not words or words[0] == "NAME":
        return ""
    if words[0] not in BENCHMARKS:
        return f"{command}: no such benchmark"
    return _parsed(command, importlib.import_module(f"bench.{words[0]}").parse, words[1:], whole)


def _parsed(command: str, parse: Callable[[Sequence[str]], object], words: Sequence[str], whole: bool) -> str:
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
            parse(list(words))
    except SystemExit as end:
        unfinished = not whole and _UNFINISHED.search(told.getvalue())
        return "" if end.code == 0 or unfinished else f"{command}: {told.getvalue().splitlines()[-1]}"
    except argparse.ArgumentError as error:
        return f"{command}: {error}"
    return ""


def _script(command: str, words: Sequence[str], folder: Path) -> str:
    """A script beside the page: it is there, and knows the options."""
    script, options = folder / words[0], [word for word in words if word.startswith("--")]
    if not script.exists():
        return f"{command}: no such file"
    unknown = [option for option in options if f'"{option}"' not in script.read_text()]
    return f"{command}: {script.name} has no option {unknown[0]}" if unknown else ""
