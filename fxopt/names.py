"""The names in Python code: which globals a function reads or assigns, and whose code it is."""

from __future__ import annotations

import builtins
import dis
import functools
import importlib.util
import itertools
import os
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


def attributes_named(function: types.FunctionType) -> frozenset[str]:
    """All names in a function's code but those that it takes from modules of libraries alone: np.log is no method."""
    chains = _chains(function.__code__)
    own = {name for first, name in chains if not _is_library(function.__globals__.get(first))}
    return names_in(function.__code__)[1] - {name for _, name in chains if name not in own}


@functools.cache
def _chains(code: types.CodeType) -> frozenset[tuple[str, str]]:
    """The names in code, each with the global that it is taken from, as in np.linalg.norm, or ""."""
    found, first = set[tuple[str, str]](), ""
    for step in dis.get_instructions(code):
        taken = step.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if isinstance(step.argval, str):
            found.add((first if taken else "", step.argval))
        if not taken:
            first = step.argval if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ""
    return frozenset(found).union(*(_chains(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _is_library(value: Any) -> bool:
    """Whether it is a module that holds nothing of the user's; os holds the environment."""
    return isinstance(value, types.ModuleType) and not is_users(value.__name__) and value is not os


# With these, code asks for attributes by names that it may not spell.
_ASKING = frozenset({"getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "asdict", "astuple"})
_CALLS = {"CALL", "CALL_FUNCTION", "PRECALL"}  # of 3.12, of 3.10, and what stands in front of the call in 3.11


@functools.cache
def names_asked(code: types.CodeType) -> tuple[frozenset[str], bool]:
    """The globals that a function gives to getattr as names of attributes, and whether it computes names otherwise."""
    inner = [names_asked(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    steps = list(dis.get_instructions(code))
    words = _ASKING.intersection((*code.co_names, *(each for each in code.co_consts if isinstance(each, str))))
    loads = [at for at, step in enumerate(steps) if step.argval == "getattr" and step.opname == "LOAD_GLOBAL"]
    asked = [_asked(steps[at + 1 :]) for at in loads]
    computed = bool(words - {"getattr"}) or bool(words and not loads) or None in asked
    names = frozenset(name for name in asked if name)
    return names.union(*(names for names, _ in inner)), computed or any(computes for _, computes in inner)


def _asked(steps: list[dis.Instruction]) -> str | None:
    """The name in the call of a getattr in front of these steps: a global, "" where it is spelled, or None."""
    depth = 0
    for at, step in enumerate(steps):
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            return None
        if depth == 1 and isinstance(step.argval, str) and _are_called(steps[at + 1 :]):
            return {"LOAD_CONST": "", "LOAD_GLOBAL": step.argval}.get(step.opname)
        depth += dis.stack_effect(step.opcode, step.arg)
        if depth < 0:  # it is kept, and called later
            return None
    return None


def _are_called(steps: list[dis.Instruction]) -> bool:
    """Whether the two values that are loaded so far are given to a call, alone or with one more that is loaded next."""
    more = bool(steps) and steps[0].opname.startswith("LOAD_")
    return len(steps) > more and steps[more].opname in _CALLS and steps[more].arg == 2 + more


@functools.cache
def names_stored(code: types.CodeType, by: str = "STORE_GLOBAL") -> frozenset[str]:
    """The globals that a function assigns, or by="STORE_ATTR" the attributes, with the functions within it."""
    inner = (names_stored(constant, by) for constant in code.co_consts if isinstance(constant, types.CodeType))
    stored = (step.argval for step in dis.get_instructions(code) if step.opname == by)
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
    torchgen triton tensordict pyvers tqdm typing_extensions filelock fsspec iopath einops einx beartype jaxtyping
    typeguard frozendict packaging attr attrs loguru psutil yaml requests huggingface_hub safetensors tokenizers"""
_OF_LIBRARIES = frozenset(_LIBRARIES.split())


@functools.lru_cache(maxsize=4096)
def is_users(module: str | None) -> bool:
    """Whether the module of this name is the user's, or of a library of models; not what models are built on."""
    top = (module or "").partition(".")[0]
    return top == "__main__" or (top not in sys.stdlib_module_names and top not in _OF_LIBRARIES)
