"""The Python of a division's hosts as one graph of calls: of parts, of boundaries, and of what lies between.

The forward runs once with torch.fx proxies in place of its arguments, on a stand-in whose parts and boundaries only
record that they were called. So nothing communicates and no module runs. torch.fx alone would believe more than is
true: here a question that a proxy cannot answer, a mode that the forward switches and an effect of it are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Attribute, GraphAppendingTracer

from fxopt.capture.generators import undrawn
from fxopt.capture.reach import Reach, content, refill
from fxopt.names import is_users
from fxopt.runtime.context import ambient
from fxopt.runtime.flatten import is_constant
from fxopt.runtime.sharded.division import Division, StandIn
from fxopt.runtime.watch import Watch
from fxopt.torch_internals.autograd import hooks_on_saved_tensors
from fxopt.torch_internals.modes import no_dispatch_modes

_ANSWERS = (type(None), bool, str)  # what a forward may decide by: watched, and no proxy


class NotTraced(Exception):
    """Why the hosts' Python is no graph of calls."""


@dataclass
class Hosts:
    """The hosts' Python for one form of arguments.

    Attributes:
        graph: placeholders, call_module of parts and boundaries, get_attr of hosts' tensors, and functions and methods.
        values: what placeholders and the attributes read of them were: an object, or _UNKNOWN of a tensor.
        answers: (attributes of an argument, value) of what the forward may have decided by.
    """

    graph: fx.Graph
    values: dict[fx.Node, Any] = field(default_factory=dict)
    answers: list[tuple[tuple[int | str, ...], Any]] = field(default_factory=list)


def traced(division: Division, args: tuple, kwargs: dict[str, Any]) -> Hosts:
    """The hosts' Python on these arguments, of which tensors and objects become placeholders.

    Raises:
        NotTraced: it cannot be told without running it.
    """
    for path, why in division.special.items():
        raise NotTraced(f"{path} {why}")
    hosts = Hosts(fx.Graph())
    tracer = _Tracer(hosts)
    stubs: dict[str, nn.Module] = {path: _Stub(path, tracer) for path in division.inner}
    stand_in = StandIn(division, stubs)
    paths = {host: path for path, host in division.hosts.items()}
    for host, copy in stand_in.hosts:
        for name, tensor in (*host._parameters.items(), *host._buffers.items()):
            if tensor is not None:
                copy.__dict__[name] = tracer.create_proxy("get_attr", f"{paths[host]}.{name}".lstrip("."), (), {})
    inputs = [tracer.argument(index, value) for index, value in enumerate(args)]
    named = {name: tracer.argument(name, value) for name, value in kwargs.items()}
    with _without_effects(stand_in):
        try:
            result = type(division.root).forward(stand_in.root, *inputs, **named)
            hosts.graph.output(tracer.create_arg(result))
        except NotTraced:
            raise
        except Exception as error:
            raise NotTraced(
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            ) from error
    return hosts


class _Tracer(GraphAppendingTracer):
    def __init__(self, hosts: Hosts) -> None:
        super().__init__(hosts.graph)
        self.hosts = hosts
        self.origins: dict[fx.Node, tuple[int | str, ...]] = {}
        self._modes = ambient(), hooks_on_saved_tensors()

    def argument(self, where: int | str, value: Any) -> Any:
        if is_constant(value):
            return value
        node = self.graph.placeholder(f"arg{where}" if isinstance(where, int) else where)
        return self.known(node, value, (where,))

    def known(self, node: fx.Node, value: Any, origin: tuple[int | str, ...]) -> fx.Proxy:
        if not isinstance(value, Tensor):
            self.hosts.values[node], self.origins[node] = value, origin
        return self.proxy(node)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if (ambient(), hooks_on_saved_tensors()) != self._modes:
            raise NotTraced("its forward switches gradients, autocast, checkpointing or another mode")
        return super().create_node(*args, **kwargs)


class _Value(fx.Proxy):
    """A proxy that does not pass for another kind of object, and knows the attributes of arguments."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        if is_users(sys._getframe(1).f_globals.get("__name__")):
            raise NotTraced("its forward asks for the type of a value")
        return type(self)

    def __getattr__(self, name: str) -> Any:
        tracer: Any = object.__getattribute__(self, "tracer")
        node: fx.Node = object.__getattribute__(self, "node")
        if node not in tracer.hosts.values:
            return Attribute(self, name)
        value, origin = getattr(tracer.hosts.values[node], name), (*tracer.origins[node], name)
        if isinstance(value, _ANSWERS):
            tracer.hosts.answers.append((origin, value))
            return value
        if callable(value):
            return Attribute(self, name)
        return tracer.known(tracer.create_node("call_function", getattr, (node, name), {}), value, origin)


class _Stub(nn.Module):
    """Stands for a part or a boundary: its call is recorded."""

    def __init__(self, path: str, tracer: _Tracer) -> None:
        super().__init__()
        self.path, self.tracer = path, tracer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_module", self.path, args, kwargs)


@contextmanager
def _without_effects(stand_in: StandIn) -> Iterator[None]:
    """Puts back what the forward changes beside its result, and refuses it.

    Raises:
        NotTraced: it does change something.
    """
    copies = [copy for _, copy in stand_in.hosts]
    before = [_attributes(copy) for copy in copies]
    held = [(value, content(value)) for copy in copies for value in vars(copy).values()]
    watch, reach, drawn = Watch(stand_in.root), Reach(stand_in.root), torch.get_rng_state()
    if watch.too_large:
        raise NotTraced(f"{watch.too_large[0]}, of which no change would be seen")
    with undrawn(stand_in.root) as generators, no_dispatch_modes():
        try:
            yield
            changed = [str(slot) for slot in watch.changed()]
            if changed or not watch.holds() or before != [_attributes(copy) for copy in copies]:
                raise NotTraced(f"its forward changes {', '.join(changed) or 'its own attributes'}")
            if outside := reach.changed():
                raise NotTraced(f"its forward changes {outside}, which is not the model's own")
            if generators.advanced() or not torch.equal(drawn, torch.get_rng_state()):
                raise NotTraced("its forward draws random numbers by itself")
        finally:
            reach.put_back()
            for value, was in held:
                if was is not None:
                    refill(value, was)
            torch.set_rng_state(drawn)


def _attributes(module: nn.Module) -> dict[str, int]:
    return {name: id(value) for name, value in vars(module).items()}
