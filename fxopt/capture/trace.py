"""One trace of a function on fake tensors into a graph of ATen overloads before autograd.

The modes are those of torch's make_fx(pre_dispatch=True). make_fx itself is not used: its tracer patches nn.Module for
the whole process while it runs, and other threads may be serving the model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fxopt.capture.answers import Answers
from fxopt.capture.captured import Read
from fxopt.capture.casts import casts_of
from fxopt.capture.checkpointed import Regions
from fxopt.capture.constants import is_small, places_of
from fxopt.capture.data_cuts import cut_within
from fxopt.capture.decided import keep_decisions
from fxopt.capture.errors import Busy, CaptureError, StartAgain, noticing
from fxopt.capture.forms import Forms
from fxopt.capture.function_mode import FunctionMode
from fxopt.capture.packed_sequences import PackedSequences
from fxopt.capture.patches import patch, refuse_to_print
from fxopt.capture.places import Places
from fxopt.capture.prints import printing
from fxopt.capture.proofs import ITEMS, Proofs
from fxopt.capture.recorded import graph_module, refuse_transforms
from fxopt.capture.recurrent import PADDED, any_length
from fxopt.capture.repairs import as_question
from fxopt.capture.settings import kept
from fxopt.capture.size_guards import guard_sizes
from fxopt.capture.untouched import written
from fxopt.findings import Miss, Place
from fxopt.locks import WAIT, lock
from fxopt.names import is_users
from fxopt.shape.memory import Memory
from fxopt.torch_internals.fake_tensors import DATA_DEPENDENT, FakeTensor, FakeTensorMode
from fxopt.torch_internals.graphs import known_weakly
from fxopt.torch_internals.modes import (
    is_any_autocast_enabled,
    is_functorch_wrapped_tensor,
    modes_of_this_thread,
    no_dispatch_modes,
    no_function_modes,
)
from fxopt.torch_internals.shape_env import TraceShapeEnv
from fxopt.torch_internals.slices import slices_have_terms
from fxopt.torch_internals.storage import is_borrowed, set_version, storage_number
from fxopt.torch_internals.symbols import depends_on_data, is_settled, statically_known_true
from fxopt.torch_internals.tracing import (
    SYMBOLIC,
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    disable_autocast_cache,
    disable_proxy_modes_tracing,
    enable_python_dispatcher,
    number_proxy,
    proxy_of,
    record,
    record_number,
    reset_cached_ops,
    stands_for,
    sym_numel,
)

slices_have_terms()

P = ParamSpec("P")
T = TypeVar("T")
TRACE_LOCK = lock()  # what is changed in torch is the process's


class Tracer(PythonKeyTracer):
    """Records nodes with their places. Constants are interned once; one that is a known tensor is that placeholder.

    Attributes:
        read: constants whose numbers Python has read.
    """

    def __init__(self, places: Places, known: dict[int, torch.fx.Node], memory: Memory):
        super().__init__()
        self.root = nn.Module()
        self.graph = torch.fx.Graph(tracer_cls=Tracer)
        self.tensor_attrs: dict[Any, str] = {}
        self.known = known
        self.memory = memory
        self.read: list[Read] = []
        self._places = places
        self._versions: list[tuple[torch.Tensor, int]] = []  # of constants, as they were before the trace

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            if id(a) in self.known:
                return self.known[id(a)]
            if isinstance(a, FakeTensor) or is_functorch_wrapped_tensor(a):
                raise CaptureError("uses a tensor that the trace has not seen (a function transform such as vmap?)")
            if a not in self.tensor_attrs:
                name = self.tensor_attrs[a] = f"_constant{len(self.tensor_attrs)}"
                with no_function_modes():  # no question of the traced code's
                    if not a.is_inference():
                        self._versions.append((a, a._version))
                self.root.__dict__[name] = a
            node = self.create_node("get_attr", self.tensor_attrs[a], (), {})
            node.meta["memory"] = self.memory.of(a)
            return node
        return super().create_arg(a)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> torch.fx.Node:  # type: ignore[override]
        with no_function_modes():
            node = super().create_node(kind, *args, **kwargs)
        if kind == "call_function" or kind == "call_module":
            node.meta["place"] = self._places.here()
        return node

    def opaque_call(self, kind: str, module: nn.Module, flat: Sequence[Any]) -> torch.fx.Proxy:
        """A call of a module that runs as it is, which becomes a part of the graph under a name of this kind."""
        name = f"{kind}{len(list(self.root.children()))}"
        self.root.add_module(name, module)
        return self.create_proxy("call_module", name, tuple(map(self.unwrap_proxy, flat)), {})

    def reads(self, tensor: torch.Tensor) -> None:
        if tensor.is_inference():
            raise CaptureError("reads the numbers of an inference tensor, whose edits nobody counts")
        if all(tensor is not other for other, _, _ in self.read):
            with no_function_modes(), no_dispatch_modes(), torch.inference_mode(False):
                numbers = tensor.detach().clone() if is_small(tensor) else None
            self.read.append((tensor, tensor._version, numbers))

    def here(self) -> Place:
        return self._places.here()

    def put_back(self) -> None:
        """An edit of a constant is one of its fake, but counts as a version of the constant's own."""
        for tensor, version in self._versions:
            set_version(tensor, version)


class Traced(NamedTuple):
    """asked: what the user's code asked of its tensors ("strides", "requires_grad"); read: of others, their numbers;
    taken: answers of the first call."""

    graph: torch.fx.GraphModule
    asked: set[str]
    read: list[Read]
    taken: list[Miss]


class _ProxyMode(ProxyTorchDispatchMode):
    """switched: an operator was called in another inference mode than the model."""

    switched = False

    def __init__(self, tracer: Tracer, shape_env: TraceShapeEnv, proofs: Proofs):
        super().__init__(tracer, "real", pre_dispatch=True)
        self._shape_env = shape_env
        self._proofs = proofs
        self._forms = Forms(tracer)
        self._inference = torch.is_inference_mode_enabled()
        self._of_arrays: dict[int, torch.Tensor] = {}  # by the number of their storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.switched |= torch.is_inference_mode_enabled() != self._inference
        if is_any_autocast_enabled() and (cast := casts_of(func, args, kwargs or {})) is not None:
            with self:  # records them
                return cast(*args, **(kwargs or {}))
        if kwargs and isinstance(kwargs.get("generator"), torch.Generator):
            raise CaptureError("draws from a generator, which a graph would not seed again")
        if func._schema.is_mutable:
            if as_question(func, args, kwargs or {}, self.tracer):
                return None
            _refuse_constants(func, args, kwargs or {}, self._of_arrays)
        if func is torch.ops.aten.sym_numel.default:  # as a product of sizes
            with self:
                return sym_numel(*args)
        if func is torch.ops.aten.ravel.default:  # unlike a reshape, it copies where a view would do
            with self:
                return torch.ops.aten.contiguous.default(*args).view(-1)
        if func in ITEMS and not isinstance(args[0], FakeTensor):
            with no_function_modes():
                self.tracer.reads(args[0])  # type: ignore[union-attr]
        elif func in ITEMS and (number := self._proofs.number(args[0])) is not None:
            return number
        elif func in ITEMS and (known := self._proofs.constant(args[0])) is not None:
            with no_function_modes(), no_dispatch_modes():
                return known.item()
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], places_of(args[1], args[0], self._proofs))
        if (part := cut_within(func, args, self.tracer)) is not None:
            return part
        if func in PADDED:
            with no_function_modes():
                if (states := any_length(func, args, self.tracer)) is not None:
                    return states
        guard_sizes(func, args)
        if func is torch.ops.aten.contiguous.default:
            args = (self._twin(args[0]), *args[1:])
        if any(not isinstance(tensor, FakeTensor) for tensor in written(func, args, kwargs or {})):
            raise CaptureError("edits a tensor that is no parameter, buffer or input")
        self._shape_env.operator = func
        with no_function_modes():  # recording reads strides, but not for the user
            key = self._forms.key(func, args, kwargs)
            try:
                out: Any = self._forms.again(key, args)
                if out is not None:
                    return out
                out = super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self._shape_env.operator = None
            self._forms.learn(key, out)
            if func is torch.ops.aten.lift_fresh.default and _is_of_an_array(args[0]):
                self._of_arrays[storage_number(out)] = out
            if func in ITEMS and isinstance(out, torch.SymInt):
                self._proofs.bound(out, args[0])
            return self._divided(out, *args) if func is torch.ops.aten.arange.start_step else out

    def __sym_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Arithmetic of floats that depend on data is no algebra: x - x is no 0 where x is infinite, x == x is not true
        where it is no number, and sums are rounded. Its results are numbers of their own, computed at each call."""
        out = super().__sym_dispatch__(func, types, args, kwargs)
        symbolic = [value for value in args if isinstance(value, SYMBOLIC)]
        if not any(map(depends_on_data, symbolic)) or func is torch.sym_float:
            return out
        if isinstance(out, float | torch.SymFloat):
            kind: type = torch.SymFloat
        elif any(isinstance(value, torch.SymFloat) for value in symbolic) and is_settled(out, symbolic):
            kind = torch.SymBool
        else:
            return out
        with disable_proxy_modes_tracing():
            own = self._shape_env.unknown(kind)
        taken = tuple(number_proxy(value, self.tracer) if isinstance(value, SYMBOLIC) else value for value in args)
        record_number(own, self.tracer.create_proxy("call_function", func, taken, {}), self.tracer)
        return own

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """x.contiguous() is x itself only where x is contiguous; were they one, x would be read from the copy."""
        if proxy_of(tensor, self.tracer) is None:  # a constant
            return tensor
        with disable_proxy_modes_tracing():
            twin = torch.ops.aten.alias.default(tensor)
        stands_for(twin, tensor, self.tracer)
        return twin

    def _divided(self, out: Any, start: Any, end: Any, step: Any = 1) -> torch.Tensor:
        """arange(0, B * L, L), as F.embedding_bag counts its bags, has B items, not (B*L + L - 1) // L."""
        if not isinstance(step, torch.SymInt) or not statically_known_true((end - start) % step == 0):
            return out
        proxy: Any = proxy_of(out, self.tracer)
        with disable_proxy_modes_tracing():
            exact = torch.empty((end - start) // step, dtype=out.dtype, device=out.device)
        record(exact, proxy, self.tracer)
        return exact


def _is_of_an_array(tensor: torch.Tensor) -> bool:
    """torch.from_numpy(): the memory is another's, and no literal's."""
    with no_function_modes():
        return not isinstance(tensor, FakeTensor) and is_borrowed(tensor)


def _refuse_constants(func: Any, args: tuple, kwargs: dict, of_arrays: Container[int]) -> None:
    """A tensor that is no state would be edited here and now, and an array by whom nobody sees."""
    named = zip(func._schema.arguments, args, strict=False)
    values = [value for argument, value in named if argument.is_write]
    values += [kwargs.get(argument.name) for argument in func._schema.arguments if argument.is_write]
    for value in values:
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, torch.Tensor) and (
                not isinstance(tensor, FakeTensor) or storage_number(tensor) in of_arrays
            ):
                raise CaptureError("edits a tensor that is no parameter, no buffer and no input")


def _stopping(error: Exception) -> Exception:
    """What stops the trace where the user's code has caught an error of it."""
    if isinstance(error, (CaptureError, StartAgain, *DATA_DEPENDENT)):
        return error
    reason = f"catches {type(error).__name__}, and a graph would not find out when it is raised"
    return CaptureError(reason).with_traceback(error.__traceback__)


def _alone(trace: Callable[P, T]) -> Callable[P, T]:
    """One trace at a time, after which everything is as it was before."""

    @functools.wraps(trace)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        if not TRACE_LOCK.acquire(timeout=WAIT):
            raise Busy(f"another thread has been tracing for {WAIT} s")
        try:
            modes_of_this_thread()
            return kept(lambda: trace(*args, **kwargs))
        finally:
            TRACE_LOCK.release()

    return locked


@_alone
def trace(
    run: Callable[[Tracer], Sequence[Any]],
    tensors: Sequence[torch.Tensor],
    reals: Sequence[torch.Tensor],
    stand_ins: int,
    fake_mode: FakeTensorMode,
    places: Places,
    mode: TorchFunctionMode,
    spaces: Iterable[dict[str, Any]],
    takes_answers: bool,
) -> Traced:
    """Record what `run(tracer)` does with `tensors`, which become the placeholders in order.

    Args:
        run: returns the flat outputs: tensors, SymInts, plain constants.
        reals: per placeholder, the real tensor.
        stand_ins: so many of them, the first ones, stand for their placeholder where Python reaches around the fakes.
        mode: a further function mode that sees the user's calls.
        spaces: the globals of the user's functions that ask isinstance(), or compute with functions of math.
        takes_answers: whether the first call may answer questions about data.
    """
    known: dict[int, torch.fx.Node] = {}
    tracer = Tracer(places, known, Memory())
    shape_env: TraceShapeEnv = fake_mode.shape_env  # type: ignore[assignment]
    proofs = Proofs(tracer)
    regions, sequences = Regions(tracer), PackedSequences(tracer)
    answers = Answers(tracer, proofs, shape_env.decided, reals, takes_answers)
    shape_env.on_question = answers.of_condition
    functions, recording = FunctionMode(tracer, proofs, sequences, answers), _ProxyMode(tracer, shape_env, proofs)
    with printing(refuse_to_print):
        patch(fake_mode, regions, sequences, spaces, tracer)
        for number, (tensor, real) in enumerate(zip(tensors, reals, strict=True)):
            proxy = tracer.create_proxy("placeholder", f"p{number}", (), {})
            record(tensor, proxy, tracer)
            own = {"memory": tracer.memory.of(real), "asks": real.requires_grad, "contiguous": real.is_contiguous()}
            proxy.node.meta |= own
            if number < stand_ins:
                known[id(real)] = proxy.node
        uncached = disable_autocast_cache()
        try:
            with fake_mode, enable_python_dispatcher(), functions, mode, recording, uncached, noticing() as noticed:
                reset_cached_ops()  # `recording` forgets all that this process has called whenever it is entered again
                results = run(tracer)
                outputs = tuple(_proxy_of(value, tracer) for value in results)
        finally:
            tracer.put_back()
            shape_env.on_question = None
        tracer.create_node("output", "output", (tracer.create_arg(outputs),), {})
    asked = (error for error, module in shape_env.raised if is_users(module))
    if caught := [*asked, *noticed]:
        raise _stopping(caught[0])
    if functions.made_leaves and any(isinstance(value, torch.Tensor) and value.requires_grad for value in results):
        raise CaptureError("returns what requires gradients of parameters that it makes, which a graph does not keep")
    if recording.switched:
        raise CaptureError("switches inference mode, which a graph does not keep")
    refuse_transforms(tracer.graph)
    keep_decisions(tracer.graph, shape_env.decided)
    module = graph_module(tracer)
    regions.cut(module)
    tracer.root = torch.nn.Module()  # proxies and their tracer are a cycle, which would hold the leaves
    return Traced(known_weakly(module), functions.asked, tracer.read, answers.taken)


def _proxy_of(value: Any, tracer: Tracer) -> Any:
    if isinstance(value, torch.Tensor):
        proxy = proxy_of(value, tracer)
        return value if proxy is None else proxy
    return number_proxy(value, tracer) if isinstance(value, SYMBOLIC) else value
