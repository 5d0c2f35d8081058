"""One trace of a function on fake tensors into a graph of ATen overloads before autograd.

The modes are those of torch's make_fx(pre_dispatch=True). make_fx itself is not used: its tracer patches nn.Module for
the whole process while it runs, and other threads may be serving the model.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.fx.experimental._config as shape_config
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch import nn
from torch._decomp.decompositions import sym_numel
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, is_accessor_node, statically_known_true
from torch.overrides import TorchFunctionMode

from fxopt.capture.errors import CaptureError
from fxopt.capture.places import Places
from fxopt.capture.proofs import ITEMS, Proofs
from fxopt.capture.shape_env import TraceShapeEnv
from fxopt.findings import Place

TRACE_LOCK = threading.RLock()
_SQUEEZES = frozenset(getattr(torch.ops.aten.squeeze, name) for name in ("default", "dim", "dims")) | frozenset(
    getattr(torch.ops.aten.squeeze_, name) for name in ("default", "dim", "dims")
)
_STRIDES = frozenset({torch.Tensor.is_contiguous, torch.Tensor.stride, torch.Tensor.data_ptr})
_GRADIENTS = frozenset(
    {
        torch.autograd.grad,
        torch.autograd.backward,
        torch.Tensor.backward,
        torch.Tensor.register_hook,
        torch.Tensor.retain_grad,
        torch.Tensor.requires_grad_,
    }
)
_NOISY = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")  # they log what we handle


class Tracer(proxy_tensor.PythonKeyTracer):
    """Records nodes with their places. Constants are interned once; one that is a known tensor is that placeholder."""

    def __init__(self, places: Places, known: dict[int, torch.fx.Node]):
        super().__init__()
        self.root = nn.Module()
        self.graph = torch.fx.Graph(tracer_cls=Tracer)
        self.tensor_attrs: dict[Any, str] = {}
        self.known = known
        self._places = places

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            if id(a) in self.known:
                return self.known[id(a)]
            if isinstance(a, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(a):
                raise CaptureError("uses a tensor that the trace has not seen (a function transform such as vmap?)")
            if a not in self.tensor_attrs:
                name = self.tensor_attrs[a] = f"_constant{len(self.tensor_attrs)}"
                self.root.__dict__[name] = a
            return self.create_node("get_attr", self.tensor_attrs[a], (), {})
        return super().create_arg(a)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> torch.fx.Node:  # type: ignore[override]
        with torch._C.DisableTorchFunction():
            node = super().create_node(kind, *args, **kwargs)
        if kind == "call_function" or kind == "call_module":
            node.meta["place"] = self._places.here()
        return node

    def here(self) -> Place:
        return self._places.here()


class _ProxyMode(proxy_tensor.ProxyTorchDispatchMode):
    """switched: an operator was called in another inference mode than the model."""

    switched = False

    def __init__(self, tracer: Tracer, shape_env: TraceShapeEnv, proofs: Proofs):
        super().__init__(tracer, "real", pre_dispatch=True)
        self._shape_env = shape_env
        self._proofs = proofs
        self._inference = torch.is_inference_mode_enabled()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.switched |= torch.is_inference_mode_enabled() != self._inference
        if kwargs and isinstance(kwargs.get("generator"), torch.Generator):
            raise CaptureError("draws from a generator, which a graph would not seed again")
        if func is torch.ops.aten.sym_numel.default:  # as a product of sizes
            with self:
                return sym_numel(*args)
        if func in ITEMS and (number := self._proofs.number(args[0])) is not None:
            return number
        if func in _SQUEEZES:
            _guard_squeeze(args)
        if func is torch.ops.aten.contiguous.default:
            args = (self._twin(args[0]), *args[1:])
        self._shape_env.operator = func
        with torch._C.DisableTorchFunction():  # recording reads strides, but not for the user
            try:
                out = super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self._shape_env.operator = None
            if func in ITEMS and isinstance(out, torch.SymInt):
                self._proofs.bound(out, args[0])
            return self._divided(out, *args) if func is torch.ops.aten.arange.start_step else out

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """x.contiguous() is x itself only where x is contiguous; were they one, x would be read from the copy."""
        slot = proxy_tensor.get_proxy_slot(tensor, self.tracer, None)
        if slot is None:  # a constant
            return tensor
        with proxy_tensor.disable_proxy_modes_tracing():
            twin = torch.ops.aten.alias.default(tensor)
        proxy_tensor.set_proxy_slot(twin, self.tracer, slot)
        return twin

    def _divided(self, out: Any, start: Any, end: Any, step: Any = 1) -> torch.Tensor:
        """arange(0, B * L, L), as F.embedding_bag counts its bags, has B items, not (B*L + L - 1) // L."""
        if not isinstance(step, torch.SymInt) or not statically_known_true((end - start) % step == 0):
            return out
        proxy = proxy_tensor.get_proxy_slot(out, self.tracer).proxy
        with proxy_tensor.disable_proxy_modes_tracing():
            exact = torch.empty((end - start) // step, dtype=out.dtype, device=out.device)
        proxy_tensor.track_tensor_tree(exact, proxy, constant=None, tracer=self.tracer)
        return exact


def _guard_squeeze(args: Any) -> None:
    """Squeezing a symbolic dim gives another rank at size 1: make that a guard (torch assumes "not 1" silently)."""
    tensor, *dims = args
    chosen = range(tensor.ndim) if not dims else [dims[0]] if isinstance(dims[0], int) else dims[0]
    for d in chosen:
        if tensor.ndim:
            bool(tensor.shape[d] != 1)


class _FunctionMode(proxy_tensor.PreDispatchTorchFunctionMode):
    """Watches for what a graph cannot say.

    Attributes:
        autocast: where autocast was entered. (Raising there would leave it on: its context manager has switched it.)
        strides_read: the user's code asked for strides, which the fakes of the inputs do not know.
    """

    autocast: Place | None = None
    strides_read = False

    def __init__(self, tracer: Tracer, proofs: Proofs):
        super().__init__(tracer)  # type: ignore[arg-type]
        self._proofs = proofs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.amp.autocast_mode._enter_autocast:
            self.autocast = self.autocast or self.tracer.here()  # type: ignore[union-attr]
        elif func in _STRIDES and not isinstance(args[0], nn.Parameter):
            self.strides_read = True
        elif func in _GRADIENTS:
            raise CaptureError(f"calls {func.__name__}, which a graph of the forward does not keep")
        elif func is torch._assert and self._asserts(*args, **(kwargs or {})):
            return None
        return super().__torch_function__(func, types, args, kwargs)

    def _asserts(self, condition: Any, message: str) -> bool:
        """An assert about data stays in the graph, in its place and with its error; a proved one goes."""
        node = self._proofs.node_of(condition) if isinstance(condition, FakeTensor) else None
        if node is None:
            return False
        if self._proofs.number(condition) is None:
            self.tracer.create_node("call_function", torch._assert, (node, message), {})
        return self._proofs.number(condition) != 0


def trace(
    run: Callable[[Tracer], Sequence[Any]],
    tensors: Sequence[torch.Tensor],
    reals: Sequence[torch.Tensor | None],
    fake_mode: FakeTensorMode,
    places: Places,
    modes: Sequence[TorchFunctionMode] = (),
) -> tuple[torch.fx.GraphModule, bool]:
    """Record what `run(tracer)` does with `tensors`, which become the placeholders in order.

    Args:
        run: returns the flat outputs: tensors, SymInts, plain constants.
        reals: per placeholder, the real tensor that stands for it when Python code reaches around the fakes.
        modes: further function modes that see the user's calls.

    Returns:
        The graph, and whether the user's code looked at strides.
    """
    known: dict[int, torch.fx.Node] = {}
    tracer = Tracer(places, known)
    shape_env: TraceShapeEnv = fake_mode.shape_env  # type: ignore[assignment]
    proofs = Proofs(tracer)
    functions = _FunctionMode(tracer, proofs)
    with TRACE_LOCK, shape_config.patch(backed_size_oblivious=True), _patched(tracer, shape_env):  # type: ignore[attr-defined]
        for number, (tensor, real) in enumerate(zip(tensors, reals, strict=True)):
            proxy = tracer.create_proxy("placeholder", f"p{number}", (), {})
            proxy_tensor.track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)
            if real is not None:
                known[id(real)] = proxy.node
        with ExitStack() as stack:
            stack.enter_context(fake_mode)
            stack.enter_context(enable_python_dispatcher())
            stack.enter_context(functions)
            for mode in modes:
                stack.enter_context(mode)
            recording = stack.enter_context(_ProxyMode(tracer, shape_env, proofs))
            stack.enter_context(proxy_tensor.disable_autocast_cache())
            outputs = tuple(_proxy_of(value, tracer) for value in run(tracer))
        tracer.create_node("output", "output", (tracer.create_arg(outputs),), {})
    if functions.autocast is not None:
        raise CaptureError("uses autocast", functions.autocast)
    if recording.switched:
        raise CaptureError("switches inference mode, which a graph does not keep")
    _refuse_transforms(tracer.graph)
    return _graph_module(tracer), functions.strides_read


def _refuse_transforms(graph: torch.fx.Graph) -> None:
    """vmap, jvp and operators with subgraphs leave nodes that are no operators, and do not run again."""
    for node in graph.nodes:
        if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):
            continue
        plain = getattr(node.target, "__module__", "") in ("_operator", "math", "torch")
        if not plain and node.target is not torch._C._set_grad_enabled:
            raise CaptureError(f"uses {getattr(node.target, '__name__', node.target)}", node.meta["place"])


def _proxy_of(value: Any, tracer: Tracer) -> Any:
    if isinstance(value, torch.Tensor):
        return proxy_tensor.get_proxy_slot(value, tracer, value, lambda slot: slot.proxy)
    if isinstance(value, proxy_tensor.py_sym_types):
        return proxy_tensor.get_proxy_slot(value, tracer).force()
    return value


def _graph_module(tracer: Tracer) -> torch.fx.GraphModule:
    constants = {n: tracer.root.__dict__.pop(n) for n in tracer.tensor_attrs.values()}
    root = {**constants, **dict(tracer.root.named_children())}
    module = torch.fx.GraphModule(root, tracer.graph, "Captured")
    module.graph.eliminate_dead_code(lambda node: node.is_impure() or not _is_size(node))
    _share_sizes(module.graph)
    for name, tensor in constants.items():  # plain attributes: not in the state_dict, not moved, the very same tensor
        module._parameters.pop(name, None)
        module._buffers.pop(name, None)
        module.__dict__[name] = tensor
    return module


def _is_size(node: torch.fx.Node) -> bool:
    """Reads a size, or computes with sizes only (an .item() is neither)."""
    if is_accessor_node(node):
        return True
    symbolic = proxy_tensor.py_sym_types
    return isinstance(node.meta.get("val"), symbolic) and all(
        isinstance(a.meta.get("val"), symbolic) for a in node.all_input_nodes
    )


def _share_sizes(graph: torch.fx.Graph) -> None:
    """One node for each distinct size expression."""
    first: dict[Any, torch.fx.Node] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, torch.SymInt) and not free_unbacked_symbols(value):
            kept = first.setdefault(value.node.expr, node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                graph.erase_node(node)


@contextmanager
def _patched(tracer: Tracer, shape_env: TraceShapeEnv) -> Iterator[None]:
    """Torch, for the time of a trace. Other threads see no difference.

    - meta["tensor_meta"] takes 40% of a trace and nobody here reads it;
    - Tensor.contiguous() asks is_contiguous() before it reaches a mode, which guards on sizes of 1;
    - an autograd.Function would be inlined, and its backward lost: stop there;
    - torch._check of a number that depends on data is believed, and forgotten: keep it;
    - a seed would be set once, and not in every call: stop there.
    """
    original, here = proxy_tensor._extract_tensor_metadata, threading.get_ident()

    def extract(tensor: torch.Tensor, *args: Any) -> Any:
        return None if threading.get_ident() == here else original(tensor, *args)

    apply = torch.autograd.Function.__dict__["apply"]

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here and torch.is_grad_enabled():
            raise CaptureError(f"{cls.__name__}.apply: a graph of the forward does not keep its backward")
        return apply.__get__(None, cls)(*args, **kwargs)

    check = torch._check_with

    def keep(error_type: Any, condition: Any, *message: Any) -> None:
        by_user = threading.get_ident() == here and shape_env.operator is None
        node = None
        if by_user and isinstance(condition, torch.SymBool) and free_unbacked_symbols(condition):
            node = proxy_tensor.get_proxy_slot(condition, tracer).force().node
            tracer.create_node("call_function", torch.ops.aten._assert_scalar.default, (node, "torch._check"), {})
        check(error_type, condition, *message)
        if node and node.target not in ITEMS and not free_unbacked_symbols(condition):  # it would compare s0 with s0
            raise CaptureError("checks that a number which depends on data is equal to another")

    loggers = [(logger, logger.level) for logger in map(logging.getLogger, _NOISY)]
    with (
        mock.patch.object(proxy_tensor, "_extract_tensor_metadata", extract),
        mock.patch.object(FakeTensor, "contiguous", _contiguous, create=True),
        mock.patch.object(torch.autograd.Function, "apply", classmethod(refuse)),
        mock.patch.object(torch.random, "default_generator", _Unseeded(torch.default_generator)),
        mock.patch.object(torch, "_check_with", keep),
    ):
        try:
            for logger, _ in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in loggers:
                logger.setLevel(level)


class _Unseeded:
    """A generator whose state this thread may not set."""

    def __init__(self, generator: torch.Generator):
        self._generator, self._thread = generator, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed", "set_state") and threading.get_ident() == self._thread:
            raise CaptureError("sets torch's random state, which a graph would do only once")
        return getattr(self._generator, name)


def _contiguous(self: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    return torch.ops.aten.contiguous.default(self, memory_format=memory_format)
