"""What torch.compile sees of an optimized model: the optimized graph as one call, behind checks it can trace.

Dynamo turns each comparison here into a guard of its own, so a model that changes is traced again; AOTAutograd and
Inductor look inside of the call and find the graph's operators, ours among them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from fxopt.reach.held import OWN
from fxopt.runtime.checks import TensorForm
from fxopt.runtime.context import ambient
from fxopt.runtime.executable import Executable
from fxopt.runtime.signature import forms_of
from fxopt.torch_internals.dynamo import MARK, adds_attributes, is_exporting, traces_alone, tracing
from fxopt.torch_internals.modes import is_traced, no_dispatch_modes

if TYPE_CHECKING:
    from fxopt.runtime.dispatch import Dispatcher
    from fxopt.runtime.entry import Entry

_UNTOLD = "?"
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def while_compiling(dispatcher: Dispatcher, eager: partial[Any], args: tuple, kwargs: dict) -> Any:
    """One forward of a drop-in under torch.compile or torch.export."""
    if torch.compiler.is_dynamo_compiling() and not is_exporting():
        return traced_forward(dispatcher, eager, args, kwargs)
    return eager(*args, **kwargs)


def traced_forward(dispatcher: Dispatcher, eager: partial[Any], args: tuple, kwargs: dict) -> Any:
    """A call while Dynamo traces: the capture that serves it, or the original forward."""
    served = _served(dispatcher.dynamo, args, kwargs)
    for name in (dispatcher.dynamo.names if served == _UNTOLD else served).split():
        view = getattr(dispatcher.dynamo, name)
        if view.ambient == _ambient():
            inputs = view.flatten(args, kwargs)
            if inputs is not None and view.serves(eager.args[0], inputs) and (served != _UNTOLD or _are_apart(inputs)):
                return view.rebuild(view.call(*view.constants, *view.state(), *inputs))
    return eager(*args, **kwargs)


def _served(dynamo: UnderDynamo, args: tuple, kwargs: dict) -> str:
    """The name of the view that serves a call, or that this cannot be told."""
    return dynamo.served(tuple(kwargs), *args, *kwargs.values()) if _all_leaves(args, kwargs) else dynamo.told()


class UnderDynamo:
    """What Dynamo runs of a dispatcher while it traces, and what is known since.

    Each capture that Dynamo may follow is an attribute for good, so that what it traces, and then guards, stays where
    it is while other captures come and go.

    Attributes:
        code: of the drop-in's forward, by which a trace of it alone is known.
        alone: whether Dynamo has traced the model with nothing around it.
        call: calls the dispatcher, and is hidden from Dynamo. None until `alone`.
        names: of the views that a trace may try where nothing tells which one is right.
        served: ``served(names, *leaves)`` names the view of what is captured for this call, now at the latest; "" where
            there is none. Dynamo runs it on the real tensors, which lie among the arguments themselves.
        told: the same for a call that nobody can be asked about: its tensors lie in containers, or are results.
        stands_alone: ``stands_alone()`` tells whether the present trace is of the model alone.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.code: CodeType | None = None
        self.alone = False
        self.call: Callable[..., Any] | None = None
        self.names = ""
        self._views = 0
        owner = weakref.ref(dispatcher)  # the functions here are in no cycle, which would keep the model

        def alive() -> Dispatcher:
            dispatcher = owner()
            assert dispatcher is not None  # only a call of the model gets here
            return dispatcher

        def call(*args: Any) -> Any:
            return alive()(*args)

        def served(names: tuple[str, ...], *leaves: Any) -> str:
            count = len(leaves) - len(names)
            args, kwargs = leaves[:count], dict(zip(names, leaves[count:], strict=True))
            dispatcher = alive()
            with suppress(Exception), tracing(None), no_dispatch_modes():  # what eager raises, it raises itself
                dispatcher.prepare(args, kwargs)
                found = dispatcher.find(args, kwargs, ambient())
                if found is None or adds_attributes(dispatcher.original.modules()):
                    return ""
                return dispatcher.dynamo._name_of(found[0].traced)
            return told()

        def told() -> str:
            dispatcher = alive()
            if adds_attributes(dispatcher.original.modules()):
                return ""
            for entry in dispatcher.entries:
                dispatcher.dynamo._name_of(entry.traced)
            return _UNTOLD

        def stands_alone() -> bool:
            dispatcher = alive()
            dynamo, captured = dispatcher.dynamo, any(entry.executable is not None for entry in dispatcher.entries)
            if not captured or dynamo.code is None or not traces_alone(dynamo.code):
                return False
            dynamo.alone, dynamo.call = True, torch.compiler.disable(call)
            return True

        self.served = torch.compiler.assume_constant_result(served)
        self.told = torch.compiler.assume_constant_result(told)
        self.stands_alone = torch.compiler.assume_constant_result(stands_alone)

    def _name_of(self, view: Traced | None) -> str:
        if view is None:
            return ""
        if not view.name:
            view.name, self._views = f"view_{self._views}", self._views + 1
            setattr(self, view.name, view)
            self.names = f"{self.names} {view.name}" if view.is_of_any else self.names
        return view.name


def passes_by(dispatcher: Dispatcher, args: tuple, kwargs: dict) -> bool:
    """Whether Dynamo traces an optimized model with nothing around it, and may leave its call to Python.

    There is nothing to fuse the model with then. A DLRM of 26 tables, batch 1, one thread: 13-19 us by itself, 41-45 us
    so, 140 us as a graph of Inductor's: each parameter has guards.
    """
    if not torch.compiler.is_dynamo_compiling() or is_exporting():
        return False
    dynamo = dispatcher.dynamo
    _served(dynamo, args, kwargs)
    return dynamo.stands_alone() and dynamo.alone  # a guard: the trace is for no model that was not looked at


def _all_leaves(args: tuple, kwargs: dict) -> bool:
    return all(isinstance(value, (Tensor, *_PLAIN)) for value in (*args, *kwargs.values()))


def _ambient() -> tuple:
    return torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu")


class Traced:
    """One entry as Dynamo can follow it: plain lists, no call into C++.

    held: the dicts and modules that are looked into, each once, and known by its place here. Each further way to one of
        them is a guard of Dynamo's, which compares the two: 98 of 12 modules before, now 27, and a third of the work.
    call: ``call(*constants, *state, *inputs)``, the flat outputs; one node of Dynamo's graph.
    is_of_any: whether its inputs are any tensors, each another one.
    """

    def __init__(self, entry: Entry, executable: Executable) -> None:
        self.name = ""
        grad, dtype, *_ = entry.ambient
        self.ambient = (grad, dtype, False)
        names = _constants_of(executable)
        self.constants = [getattr(executable.graph, name) for name in names]
        self.call = _in_graph(executable, names)
        self.flatten, self.rebuild = entry.signature.flatten, entry.rebuild
        self.forms = forms_of(executable.capture)
        self.is_of_any = list(executable.capture.firsts) == list(range(len(self.forms)))
        self.holds = executable.capture.guards.beyond_sizes
        assert entry.state is not None
        self.root, owners = entry.watch.modules[0], {id(vars(module)): module for module in entry.watch.modules}
        self.held: list[Any] = []
        numbers: dict[int, int] = {}

        def number(held: Any) -> int:
            if numbers.setdefault(id(held), len(self.held)) == len(self.held):
                self.held.append(held)
            return numbers[id(held)]

        self.places = [(number(where), key) for where, key in entry.state.places]
        self.aliases = [(number(where), key, place) for where, key, place in entry.state.aliases]
        unread = entry.sizes.places if entry.sizes is not None else []
        self.tensors = [*zip(self.places, entry.state.forms, strict=True)]
        self.tensors += [((number(where), key), form) for where, key, form in unread]
        slots = entry.watch.slots
        asked = [(owners.get(id(where)), where, key, value) for where, key, value in slots if isinstance(value, _PLAIN)]
        self.values = [(-1 if o is None else number(o), number(w), key, value) for o, w, key, value in asked]
        known = [slot for slot in slots if _is_known_by_itself(*slot[1:])]
        self.objects = [(number(where), key, number(value)) for where, key, value in known]
        sized = [(held, length) for held, length in entry.watch.lengths if isinstance(held, dict)]
        self.lengths = [(number(held), length - (MARK in held)) for held, length in sized]

    def serves(self, root: nn.Module, inputs: Sequence[Tensor]) -> bool:
        """root: the drop-in."""
        held = self.held
        return (
            _of_forms(inputs, self.forms)
            and all(len(held[where]) - (MARK in held[where]) == length for where, length in self.lengths)
            and all(self._holds(root, *rest) for rest in self.values)
            and all(key in held[where] and held[where][key] is held[value] for where, key, value in self.objects)
            and all(key in held[where] and _of_forms([held[where][key]], [form]) for (where, key), form in self.tensors)
            and self._ties_hold()
            and (self.holds is None or self.holds(inputs))
        )

    def _holds(self, root: nn.Module, owner: int, place: int, key: str, value: Any) -> bool:
        """Whether it is still this value. A module is asked itself: what traced code has set is not in its dict yet."""
        where = self.held[place]
        if owner < 0:
            return key in where and where[key] == value
        module = self.held[owner]
        return key in where and getattr(root if module is self.root else module, key) == value

    def _ties_hold(self) -> bool:
        held, state = self.held, self.state()
        return all(key in held[where] and held[where][key] is state[place] for where, key, place in self.aliases)

    def state(self) -> list[Tensor]:
        held = self.held
        return [held[where][key] for where, key in self.places]


_MOST_COMPARED = 256  # each with each, which takes Dynamo a second


def _are_apart(tensors: Sequence[Tensor]) -> bool:
    """Whether no two are one object; forward may ask `q is k`."""
    if len(tensors) > _MOST_COMPARED:
        return False
    return all(one is not other for place, one in enumerate(tensors) for other in tensors[:place])


def traced_view(entry: Entry) -> Traced | None:
    """None for what Dynamo would not see change: settings in objects and containers, other devices' autocast; and for
    checkpointed regions and autograd.Functions, which Dynamo knows from the original forward."""
    executable = entry.executable
    if executable is None or executable.graph is None or entry.ambient[2:] != (None, None):
        return None
    if any(hasattr(child, "own_backward") for child in executable.graph.children()):
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
        if (
            not isinstance(tensor, Tensor)
            or tensor.dtype != form.dtype
            or tensor.device != form.device
            or tensor.dim() != len(form.dims)
        ):
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
