"""What torch.compile sees of an optimized model: the optimized graph as one call, behind checks it can trace.

Dynamo turns each comparison here into a guard of its own, so a model that changes is traced again; AOTAutograd and
Inductor look inside of the call and find the graph's operators, ours among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from fxopt.reach import OWN
from fxopt.runtime.checks import TensorForm
from fxopt.runtime.executable import Executable
from fxopt.runtime.signature import forms_of
from fxopt.torch_internals.dynamo import is_exporting, traces_alone, tracing
from fxopt.torch_internals.modes import is_traced, no_dispatch_modes

if TYPE_CHECKING:
    from fxopt.runtime.dispatch import Dispatcher
    from fxopt.runtime.entry import Entry

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def while_compiling(dispatcher: Dispatcher, eager: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """One forward of a drop-in under torch.compile or torch.export."""
    if torch.compiler.is_dynamo_compiling() and not is_exporting():
        return traced_forward(dispatcher, eager, args, kwargs)
    return eager(*args, **kwargs)


def traced_forward(dispatcher: Dispatcher, eager: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """A call while Dynamo traces: the first capture that serves it, or the original forward."""
    _capture(dispatcher, args, kwargs)
    for entry in dispatcher.entries:
        view = entry.traced
        if view is not None and view.ambient == _ambient():
            inputs = entry.signature.flatten(args, kwargs)
            if inputs is not None and view.serves(inputs):
                return entry.rebuild(view.call(*view.constants, *view.state(), *inputs))
    return eager(*args, **kwargs)


class UnderDynamo:
    """What Dynamo runs of a dispatcher while it traces, and what is known since.

    Attributes:
        code: of the drop-in's forward, by which a trace of it alone is known.
        alone: whether Dynamo has traced the model with nothing around it.
        call: the dispatcher, hidden from Dynamo from then on.
        captured: ``captured(names, *leaves)`` captures what is about to be traced. Dynamo runs it on the real tensors,
            which lie among the arguments themselves; without a capture it would trace the original forward.
        stands_alone: ``stands_alone()`` tells whether the present trace is of the model alone.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.code: CodeType | None = None
        self.alone = False
        self.call: Callable[..., Any] = dispatcher

        def captured(names: tuple[str, ...], *leaves: Any) -> None:
            count = len(leaves) - len(names)
            with suppress(Exception), tracing(None), no_dispatch_modes():  # what eager raises, it raises itself
                dispatcher.prepare(leaves[:count], dict(zip(names, leaves[count:], strict=True)))

        def stands_alone() -> bool:
            captured = any(entry.executable is not None for entry in dispatcher.entries)
            if not captured or self.code is None or not traces_alone(self.code):
                return False
            self.alone, self.call = True, torch.compiler.disable(dispatcher.__call__)
            return True

        self.captured = torch.compiler.assume_constant_result(captured)
        self.stands_alone = torch.compiler.assume_constant_result(stands_alone)


def passes_by(dispatcher: Dispatcher, args: tuple, kwargs: dict) -> bool:
    """Whether Dynamo traces an optimized model with nothing around it, and may leave its call to Python.

    There is nothing to fuse the model with then. A DLRM of 26 tables, batch 1, one thread: 13-19 us by itself, 41-45 us
    so, 140 us as a graph of Inductor's: each parameter has guards.
    """
    if not torch.compiler.is_dynamo_compiling() or is_exporting():
        return False
    _capture(dispatcher, args, kwargs)
    dynamo = dispatcher.dynamo
    return dynamo.stands_alone() and dynamo.alone  # a guard: the trace is for no model that was not looked at


def _capture(dispatcher: Dispatcher, args: tuple, kwargs: dict) -> None:
    if _all_leaves(args) and _all_leaves(kwargs.values()):
        dispatcher.dynamo.captured(tuple(kwargs), *args, *kwargs.values())


def _all_leaves(values: Iterable[Any]) -> bool:
    return all(isinstance(value, (Tensor, *_PLAIN)) for value in values)


def _ambient() -> tuple:
    return torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")


class Traced:
    """One entry as Dynamo can follow it: plain lists, no call into C++.

    call: ``call(*constants, *state, *inputs)``, the flat outputs; one node of Dynamo's graph.
    """

    def __init__(self, entry: Entry, executable: Executable) -> None:
        grad, dtype, *_ = entry.ambient
        self.ambient = (grad, dtype, False)
        names = _constants_of(executable)
        self.constants = [getattr(executable.graph, name) for name in names]
        self.call = _in_graph(executable, names)
        self.forms = forms_of(executable.capture)
        guards = executable.capture.guards
        self.holds = guards.holds if guards.relations else None
        assert entry.state is not None
        self.places = entry.state.places
        slots = entry.watch.slots
        self.values = [(where, key, value) for where, key, value in slots if isinstance(value, _PLAIN)]
        self.objects = [(where, key, value) for where, key, value in slots if _is_known_by_itself(key, value)]

    def serves(self, inputs: Sequence[Tensor]) -> bool:
        return (
            _of_forms(inputs, self.forms)
            and all(key in where and where[key] == value for where, key, value in self.values)
            and all(key in where and where[key] is value for where, key, value in self.objects)
            and (self.holds is None or self.holds(inputs))
        )

    def state(self) -> list[Tensor]:
        return [where[key] for where, key in self.places]


def traced_view(entry: Entry) -> Traced | None:
    """None for what Dynamo would not see change: settings in objects and containers, other devices' autocast; and for
    checkpointed regions, which Dynamo knows from the original forward."""
    executable = entry.executable
    if executable is None or executable.graph is None or entry.ambient[2:] != (None, None):
        return None
    if any(hasattr(child, "checkpointed") for child in executable.graph.children()):
        return None
    if (
        executable.capture.leaves
        or executable.capture.filled
        or not all(isinstance(t, Tensor) for t in _outputs(executable.graph))
    ):
        return None
    known = all(isinstance(value, _PLAIN) or _is_known_by_itself(key, value) for where, key, value in entry.watch.slots
                if isinstance(where, dict))  # fmt: skip
    return Traced(entry, executable) if known else None


def _is_known_by_itself(key: str, value: Any) -> bool:
    """A submodule, or a dict of a module's own: of its submodules, parameters or buffers."""
    return isinstance(value, nn.Module) or (key in OWN and isinstance(value, dict))


def _outputs(graph: fx.GraphModule) -> list[Any]:
    (output,) = graph.graph.find_nodes(op="output")
    return [node.meta.get("val") if isinstance(node, fx.Node) else node for node in output.args[0]]


def _constants_of(executable: Executable) -> list[str]:
    assert executable.graph is not None
    return list(dict.fromkeys(str(node.target) for node in executable.graph.graph.find_nodes(op="get_attr")))


def _of_forms(tensors: Sequence[Tensor], forms: Sequence[TensorForm]) -> bool:
    sizes: dict[str, Any] = {}
    for tensor, form in zip(tensors, forms, strict=True):
        if tensor.dtype != form.dtype or tensor.device != form.device or tensor.dim() != len(form.dims):
            return False
        for size, dim in zip(tensor.shape, form.dims, strict=True):
            if size != (dim if isinstance(dim, int) else sizes.setdefault(dim, size)):
                return False
    return True


def _in_graph(executable: Executable, constants: Sequence[str]) -> Callable[..., tuple]:
    """``call(*constants, *state, *inputs)``: operator by operator for who traces it, by the shortest ways for who runs
    it. Constants are arguments, since a tracer's fake mode takes no real tensors."""
    graph, run = executable.graph, executable.run
    assert graph is not None
    count = len(constants)

    def fxopt_graph(*tensors: Any) -> tuple:
        if not is_traced():
            return tuple(run(*tensors[count:]))
        known = dict(zip(constants, tensors[:count], strict=True))
        return tuple(_WithConstants(graph, known).run(*tensors[count:]))

    return torch.compiler.allow_in_graph(fxopt_graph)


class _WithConstants(fx.Interpreter):
    """The graph with other tensors in the place of its own."""

    def __init__(self, graph: fx.GraphModule, constants: dict[str, Tensor]) -> None:
        super().__init__(graph)
        self.constants = constants

    def fetch_attr(self, target: str) -> Any:
        return self.constants[target]
