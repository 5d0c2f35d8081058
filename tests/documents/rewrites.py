"""What a pass does to the model of its example in the catalogue: operators before and after, as Config(dump=...) has
them, and the words of its report."""

from __future__ import annotations

import inspect
import re
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fxopt import Config
from fxopt.findings import Change
from tests.rewrites.test_catalogue import CATALOGUE, optimized

_CALL = re.compile(r"%(\w+) : .* = (?:call_function|get_attr)\[target=([^\]]+)\](.*?)(?:  # (.*))?$")
_ARGUMENTS = re.compile(r"\(args = \((.*?),?\), kwargs = \{(.*)\}\)$")
_SHAPE = re.compile(r"\w+\[[^\]]*\]")
_WIDEST = 56  # characters of arguments; what is longer is a program for a kernel, which nobody reads


@dataclass(frozen=True)
class Shown:
    """The first rewrite of a pass: its words, and the lines of the graph that it took and gave."""

    what: str
    why: str
    before: Sequence[str]
    after: Sequence[str]


def example(name: str) -> str:
    """The part of a page about one pass."""
    model = CATALOGUE[name].fires()
    shown = _shown(name, model)
    after = shown.after or ["# nothing: whoever read the result now reads what stood in front"]
    graph = ["# before", *shown.before, "", "# after", *after]
    said = f"The report shows “{shown.what}”, safe: “{shown.why}”."
    return "\n".join(["```py", *_written(model), "```", "", "```text", *graph, "```", "", said])


def _written(model: nn.Module) -> list[str]:
    """The methods that the model's class has of its own, and the forward that it inherits."""
    own = {name: method for name, method in vars(type(model)).items() if inspect.isfunction(method)}
    methods = {"forward": type(model).forward, **own}
    methods.pop("__init__", None)
    sources = (textwrap.dedent(inspect.getsource(method)).splitlines() for method in methods.values())
    return [line for source in sources for line in ("", "", *source)][2:]


def _shown(name: str, model: nn.Module) -> Shown:
    with tempfile.TemporaryDirectory() as folder:
        fast = optimized(name, model, Config(tune="off", dump=folder))
        (findings,) = fast._fxopt.findings
        change = _fullest([change for ran in findings.passes if ran.name == name for change in ran.changes])
        (graphs,) = Path(folder).iterdir()
        (captured,), (behind, *_) = graphs.glob("*_captured.txt"), sorted(graphs.glob(f"*_{name}.txt"))
        before, after = _lines(captured.read_text()), _lines(behind.read_text())
    old = [before[node] for node in before if node in change.old]
    new = [after[node] for node in after if node in change.new]
    return _named(Shown(change.what, change.why, old, new))


def _fullest(changes: Sequence[Change]) -> Change:
    """The change to show: the first that adds something, else the first."""
    return next((change for change in changes if change.new), changes[0])


def _lines(graph: str) -> dict[str, str]:
    """A line for each call of a dumped graph, by the name of its result."""
    calls = filter(None, map(_CALL.match, graph.splitlines()))
    return {call[1]: _line(*call.groups()) for call in calls}


def _line(name: str, target: str, arguments: str, remark: str | None) -> str:
    passed = _ARGUMENTS.match(arguments)
    if passed is None:
        return f"{name} = a constant of the graph"
    given = ", ".join(filter(None, (passed[1].replace("%", ""), passed[2].replace(": ", "="))))
    given = given if len(given) <= _WIDEST else given[: given.rindex(", ", 0, _WIDEST)] + ", ..."
    shape = _SHAPE.match(remark or "")
    value = "{}[{}]".format(*given.split(", ")) if target == "operator.getitem" else f"{_short(target)}({given})"
    return f"{name} = {value}" + (f"  # {shape[0]}" if shape else "")


def _short(target: str) -> str:
    """torch.ops.aten.add.Tensor: add; torch.ops.fxopt.mlp.default: fxopt.mlp; a function of fxopt: its name."""
    names = target.removeprefix("torch.ops.").split(".")
    if names[0] == "aten":
        return names[1]
    return ".".join(names[:2]) if target.startswith("torch.ops.") else names[-1]


def _named(shown: Shown) -> Shown:
    """Sizes that are symbols as letters, in the order of their appearance."""
    texts = [shown.what, shown.why, *shown.before, *shown.after]
    symbols = dict.fromkeys(re.findall(r"\b[su]\d+\b", " ".join(texts[2:] + texts[:2])))
    letters = dict(zip(symbols, "BNMKL", strict=False))

    def plain(lines: Sequence[str]) -> Iterator[str]:
        for line in lines:
            yield re.sub(r"\b[su]\d+\b", lambda symbol: letters.get(symbol[0], symbol[0]), line)

    what, why = plain([shown.what, shown.why])
    return Shown(what, why, list(plain(shown.before)), list(plain(shown.after)))
