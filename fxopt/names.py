"""The names in Python code: which globals a function reads or assigns, and whose code it is."""

from __future__ import annotations

import builtins
import dis
import functools
import importlib.util
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any


@functools.cache
def names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The globals that a function reads, and all its names, those of attributes too; with the functions within it."""
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    read = (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    texts = (constant for constant in code.co_consts if isinstance(constant, str))
    words = (text for text in texts if text.replace(".", "").isidentifier())
    return frozenset(read).union(*(names for names, _ in inner)), frozenset(code.co_names).union(
        words, *(names for _, names in inner)
    )


@functools.cache
def names_stored(code: types.CodeType) -> frozenset[str]:
    """The globals that a function assigns, with the functions within it."""
    inner = (names_stored(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    stored = (step.argval for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL")
    return frozenset(stored).union(*inner)


@functools.cache
def _imports_in(code: types.CodeType) -> tuple[str, ...]:
    """The modules that a function imports when it runs, as it writes them: "settings", "..settings", ".."."""
    steps = list(dis.get_instructions(code))
    levels = ((steps[place - 2].argval or 0, step) for place, step in enumerate(steps) if step.opname == "IMPORT_NAME")
    inner = (_imports_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return (*("." * level + step.argval for level, step in levels), *itertools.chain.from_iterable(inner))


def named_by(function: types.FunctionType) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(path, dict, key) of the globals that a function reads, in its own module and in others of the user's."""
    read, named = names_in(function.__code__)
    modules = list(_imported_by(function))
    if not read.isdisjoint(("eval", "exec", "globals")):
        read = frozenset(function.__globals__)
    for name in read & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            modules.append(value)
        if is_setting(value):
            yield function.__module__ or "", function.__globals__, name
    seen = set[int]()
    while modules:
        module = modules.pop()
        if id(module) in seen or not is_users(module.__name__):
            continue
        seen.add(id(module))
        for name in (named | {"__getattr__"}) & vars(module).keys():
            if isinstance(vars(module)[name], types.ModuleType):
                modules.append(vars(module)[name])
            if is_setting(vars(module)[name]):
                yield module.__name__, vars(module), name


def is_setting(value: Any) -> bool:
    """What code may decide by, and users replace: all but the modules of libraries."""
    return not isinstance(value, types.ModuleType) or is_users(value.__name__)


def missing_of(function: types.FunctionType) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(path, dict, key) of the globals that a function asks for, in its own module and in others of the user's, and
    that are not there."""
    read, named = names_in(function.__code__)
    own, pairs = function.__globals__, pairs_in(function.__code__)
    for name in (named if "globals" in read else read) - own.keys() - vars(builtins).keys():
        yield function.__module__ or "", own, name
    modules = [(name, own[name]) for name in read & own.keys()]
    seen = set[tuple[str, int]]()
    while modules:
        name, module = modules.pop()
        if not isinstance(module, types.ModuleType) or not is_users(module.__name__) or (name, id(module)) in seen:
            continue
        seen.add((name, id(module)))
        for word in {word for before, word in pairs if before == name}:
            if word in vars(module):
                modules.append((word, vars(module)[word]))
            else:
                yield module.__name__, vars(module), word


@functools.cache
def pairs_in(code: types.CodeType) -> frozenset[tuple[str, str]]:
    """The names that follow each other, as in a.b or getattr(a, "b"); with the functions within it."""
    words = [step.argval for step in dis.get_instructions(code)]
    inner = (pairs_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    pairs = ((a, b) for a, b in itertools.pairwise(words) if isinstance(a, str) and isinstance(b, str))
    return frozenset(pairs).union(*inner)


_IMPORT = ("import_module", "__import__", "modules")


def _imported_by(function: types.FunctionType) -> Iterator[types.ModuleType]:
    package = function.__globals__.get("__package__") or ""
    asked = names_in(function.__code__)[1]
    named = () if asked.isdisjoint(_IMPORT) else asked & sys.modules.keys()
    for written in (*_imports_in(function.__code__), *named):
        try:
            module = sys.modules.get(importlib.util.resolve_name(written, package))
        except ImportError:  # relative to no package: the call itself will raise
            continue
        if module is not None:
            yield module


@functools.lru_cache(maxsize=4096)
def user_classes(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if is_users(base.__module__)]


_LIBRARIES = """torch fxopt numpy scipy pandas sklearn pytest _pytest builtins sympy mpmath networkx jinja2 functorch
    torchgen triton tensordict pyvers tqdm typing_extensions filelock fsspec iopath"""
_OF_LIBRARIES = frozenset(_LIBRARIES.split())


@functools.lru_cache(maxsize=4096)
def is_users(module: str | None) -> bool:
    """Whether the module of this name is the user's, or of a library of models; not what models are built on."""
    top = (module or "").partition(".")[0]
    return top == "__main__" or (top not in sys.stdlib_module_names and top not in _OF_LIBRARIES)
