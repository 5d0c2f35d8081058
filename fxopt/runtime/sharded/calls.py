"""Calls of a model that holds communicating modules: its Python runs eagerly, and what lies between is captured.

The first call of a form is the model's own, and what the boundaries return is kept. Then the hosts' Python is traced
and cut, and the cut is compared with that call on what was kept: no boundary runs a second time. From then on calls go
through the segments. Where the hosts' Python cannot be cut, it runs itself, with drop-ins in place of the parts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import filterfalse
from typing import Any

from torch import fx, nn

from fxopt.config import Config
from fxopt.findings import Findings, Miss, Place
from fxopt.locks import lock
from fxopt.runtime.context import ambient
from fxopt.runtime.flatten import same_value
from fxopt.runtime.module import dispatcher_of
from fxopt.runtime.pieces import is_single
from fxopt.runtime.reasons import reason_of
from fxopt.runtime.sharded.cut import Cut, arrived, live_reads
from fxopt.runtime.sharded.division import Division, StandIn, divide
from fxopt.runtime.sharded.replay import Call, check
from fxopt.runtime.sharded.trace import NotTraced, traced
from fxopt.runtime.watch import Watch

Make = Callable[[nn.Module], nn.Module]
_FEWEST = 4  # operators of a segment without modules: below it a capture's checks cost what it saves


class ShardedCalls:
    """All calls of one model that holds communicating modules.

    Args:
        make: a drop-in for a module that holds none.

    Attributes:
        over: the model holds none any more.
    """

    def __init__(self, original: nn.Module, make: Make, config: Config) -> None:
        self.over = False
        self._original, self._make, self._config = original, make, config
        self._plans: tuple[_Plan, ...] = ()
        self._lock = lock()

    @property
    def findings(self) -> list[Findings]:
        return [found for plan in self._plans for found in plan.findings]

    def __call__(self, eager: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        now = ambient()
        for plan in self._plans:
            if plan.serves(args, kwargs, now):
                return plan.run(eager, args, kwargs)
        if any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values())):
            return eager(*args, **kwargs)  # a pipeline looks for the sharded modules
        if not self._lock.acquire(blocking=False):
            return eager(*args, **kwargs)
        try:
            self._plans = tuple(plan for plan in self._plans if plan.watch.same_tree())
            division = divide(self._original, self._config)
            self.over = not division.boundaries
            if self.over or len(self._plans) >= self._config.max_captures:
                return eager(*args, **kwargs)
            return self._first(division, eager, args, kwargs, now)
        finally:
            self._lock.release()

    def _first(self, division: Division, eager: Callable[..., Any], args: tuple, kwargs: dict, now: tuple) -> Any:
        call = Call(args, kwargs)
        call.begin()
        call.results = {path: [] for path in division.boundaries}
        with _recorded(division, call.results):
            call.returned = eager(*args, **kwargs)
        self._plans = (self._planned(division, call, now), *self._plans)
        return call.returned

    def _planned(self, division: Division, call: Call, now: tuple) -> _Plan:
        if "" in division.boundaries:
            return _Plan(division, self._original, now, division.boundaries[""][1])
        try:
            return _Segments(division, self._original, now, call, self._make)
        except NotTraced as error:
            reason = str(error)
        except Exception as error:  # the call itself has succeeded
            reason = reason_of(error)
        return _Parts(division, self._original, now, reason, self._make)


class _Plan:
    """How calls of one form are served: here, eagerly."""

    def __init__(self, division: Division, original: nn.Module, now: tuple, reason: str) -> None:
        self.watch = Watch(original, only=frozenset(division.hosts))
        self.division, self.reason = division, reason
        self._original, self._now, self._training = original, now, original.training

    @property
    def findings(self) -> list[Findings]:
        return [Findings(eager_reason=self.reason)]

    def serves(self, args: tuple, kwargs: dict[str, Any], now: tuple) -> bool:
        return now == self._now and self._original.training is self._training and self.watch.same_tree()

    def run(self, eager: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        return eager(*args, **kwargs)

    def _boundaries(self) -> list[Miss]:
        found = self.division.boundaries.items()
        return [Miss("communication", why, Place(path)) for path, (_, why) in found]


class _Parts(_Plan):
    """The hosts' Python as it is, around drop-ins for the parts."""

    def __init__(self, division: Division, original: nn.Module, now: tuple, reason: str, make: Make) -> None:
        super().__init__(division, original, now, reason)
        self._drop_ins = _drop_ins(division, make)

    @property
    def findings(self) -> list[Findings]:
        why = f"what lies between its modules runs as it is: {self.reason}"
        leaves = [Miss("communication", why, Place()), *self._boundaries()]
        return [Findings(leaves=leaves), *_findings(self._drop_ins.values())]

    def run(self, eager: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        stand_in = StandIn(self.division, self._drop_ins)
        try:
            return type(self._original).forward(stand_in.root, *args, **kwargs)
        finally:
            stand_in.give_back()


class _Segments(_Plan):
    """The hosts' Python cut where it communicates.

    Raises:
        NotTraced: it cannot be cut.
    """

    def __init__(self, division: Division, original: nn.Module, now: tuple, call: Call, make: Make) -> None:
        super().__init__(division, original, now, "")
        hosts = traced(division, call.args, call.kwargs)
        check(hosts, division, call)
        self._drop_ins = _drop_ins(division, make)  # for segments that stay eager
        modules = {**division.modules, **self._drop_ins, **live_reads(hosts, division)}
        cut = Cut(hosts, modules, call.results)
        for segment in cut.segments.values():
            segment.training = original.training
        self._segments = {name: make(s) if _pays(s) else s for name, s in cut.segments.items()}
        self._module = cut.module(self._segments)
        self._forms = [type(value) for value in call.values]
        self._constants = call.constants
        self._answers = hosts.answers

    @property
    def findings(self) -> list[Findings]:
        fast = [segment for segment in self._segments.values() if _pays(segment)]
        return [Findings(leaves=self._boundaries()), *_findings(fast), *_findings(self._drop_ins.values())]

    def serves(self, args: tuple, kwargs: dict[str, Any], now: tuple) -> bool:
        call = Call(args, kwargs)
        return (
            now == self._now
            and same_value(call.constants, self._constants)
            and [type(value) for value in call.values] == self._forms
            and all(same_value(call.read(origin), value) for origin, value in self._answers)
            and self.watch.holds()
        )

    def run(self, eager: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        return self._module.forward(*Call(args, kwargs).values)


def _drop_ins(division: Division, make: Make) -> dict[str, nn.Module]:
    made: dict[nn.Module, nn.Module] = {}
    for part in filterfalse(is_single, division.parts.values()):
        with suppress(TypeError):  # compiled or scripted: it runs as it is
            made[part] = make(part)
    return {path: made[part] for path, part in division.parts.items() if part in made}


def _findings(drop_ins: Iterable[nn.Module]) -> list[Findings]:
    return [found for each in drop_ins for found in dispatcher_of(each).findings]


def _pays(segment: nn.Module) -> bool:
    nodes = [node for node in segment.graph.nodes if node.op.startswith("call")]  # type: ignore[union-attr]
    return len(nodes) >= _FEWEST or any(node.op == "call_module" for node in nodes)


@contextmanager
def _recorded(division: Division, results: dict[str, list[Any]]) -> Iterator[None]:
    """Keeps what this thread's calls of boundaries return. They run as always, hooks see to it."""
    thread = threading.get_ident()

    def keep(path: str) -> Callable[..., None]:
        kept = results[path]
        return lambda module, args, result: kept.append(result) if threading.get_ident() == thread else None

    hooks = [module.register_forward_hook(keep(path)) for path, (module, _) in division.boundaries.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    results.update((path, list(map(arrived, kept))) for path, kept in results.items())
