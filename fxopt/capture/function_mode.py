"""What the user's code asks of tensors in a trace, call by call above ATen: kept, made a condition, or refused."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from fxopt.capture.answers import Answers
from fxopt.capture.asked_strides import refuse_guess, requires_by_layout
from fxopt.capture.data_cuts import with_numbers
from fxopt.capture.errors import CaptureError, notice
from fxopt.capture.numbered import numbered
from fxopt.capture.packed_sequences import PackedSequences
from fxopt.capture.proofs import Proofs
from fxopt.torch_internals.fake_tensors import FakeTensor
from fxopt.torch_internals.fused_attention import as_fused, asks_for_hint, leaves_fused
from fxopt.torch_internals.modes import AUTOCAST
from fxopt.torch_internals.python_sizes import asked_by_user, caller, compares_truth
from fxopt.torch_internals.raising import harmless_answer
from fxopt.torch_internals.storage import ASKS_FOR_VIEW
from fxopt.torch_internals.tracing import PreDispatchTorchFunctionMode, disable_proxy_modes_tracing, proxy_of, record

if TYPE_CHECKING:
    from fxopt.capture.trace import Tracer


def _accessor(name: str, kind: str) -> Any:
    return getattr(getattr(torch.Tensor, name), kind)


_DATA = _accessor("data", "__get__")
_GRAD_FN = _accessor("grad_fn", "__get__")
_ASKS = {
    torch.Tensor.is_contiguous: "strides",
    torch.Tensor.stride: "exact strides",
    torch.Tensor.dim_order: "exact strides",
    torch.Tensor.requires_grad.__get__: "requires_grad",  # type: ignore[attr-defined]
}
_MASKS = ("key_padding_mask", "attn_mask")
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
_TEXTS = {torch.Tensor.__repr__, torch.Tensor.__format__}
# These stand between the user's code and the mode.
_ABOUT_TEXTS = {__name__, "fxopt.capture.packed", "torch._tensor", "torch.overrides", FakeTensor.__module__}
_INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_READS = {torch.Tensor.tolist, *_TEXTS}
_REFUSED = {
    _accessor("data", "__set__"): "assigns to .data",
    _accessor("grad", "__get__"): "asks for .grad",
    _GRAD_FN: "asks for .grad_fn",
    _accessor("is_leaf", "__get__"): "asks for .is_leaf",
    _accessor("_version", "__get__"): "asks for ._version",
    _accessor("_base", "__get__"): "asks for ._base",
    ASKS_FOR_VIEW: "asks whether a tensor is a view",
    torch.Tensor.numpy: "reads a tensor as a NumPy array",
    torch.Tensor.__array__: "reads a tensor as a NumPy array",
    torch.Tensor.data_ptr: "asks for the address of a tensor",
    torch.Tensor.storage_offset: "asks for the storage_offset of a tensor",
    torch.Tensor.storage: "asks for the storage of a tensor",
    torch.Tensor.untyped_storage: "asks for the storage of a tensor",
    torch.Tensor.set_: "gives a tensor other memory",
    torch.Tensor.is_shared: "asks whether memory is shared",
}
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


class FunctionMode(PreDispatchTorchFunctionMode):
    """Watches for what a graph cannot say.

    Attributes:
        asked: what else than dtypes and sizes the user's code asked tensors for: "strides" (those of the inputs are not
            known to their fakes), "exact strides" or "requires_grad".
        made_leaves: whether forward made parameters of its own where gradients are off: a layer that it makes anew.
    """

    def __init__(self, tracer: Tracer, proofs: Proofs, sequences: PackedSequences, answers: Answers):
        super().__init__(tracer)  # type: ignore[arg-type]
        self.asked: set[str] = set()
        self.made_leaves = False
        self._proofs = proofs
        self._sequences = sequences
        self._answers = answers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._called(func, types, args, kwargs)
        except Exception as error:
            notice(error)
            raise

    def _called(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in AUTOCAST:  # which is switched by now: the casts that it means are recorded one by one
            return None
        if func in _ASKS and not isinstance(args[0], nn.Parameter):
            with_format = func is torch.Tensor.is_contiguous and (kwargs or args[1:])
            self._asks("exact strides" if with_format else _ASKS[func], args[0])
        elif func is torch.Tensor.requires_grad_ and False in (*args[1:], *(kwargs or {}).values()):
            if args[0].requires_grad:
                raise CaptureError("calls requires_grad_(False), which a graph of the forward does not keep")
            return args[0]
        elif func is torch.Tensor.requires_grad_ and self._is_made(args[0]) and not torch.is_grad_enabled():
            self.made_leaves = True
        elif func in _GRADIENTS:
            raise CaptureError(f"calls {func.__name__}, which a graph of the forward does not keep")
        elif func is F.multi_head_attention_forward and any(map(leaves_fused, _FUSED)):
            return as_fused(func, args, {**kwargs, **self._masks(kwargs)})
        elif func is torch.Tensor.add and leaves_fused(nn.TransformerEncoderLayer):  # which gives a contiguous sum
            return super().__torch_function__(func, types, args, kwargs).contiguous()  # type: ignore[attr-defined]
        elif func is torch.Tensor.__bool__ and asks_for_hint():
            return False
        elif func is torch.Tensor.__bool__ and (answer := self._answered(args[0])) is not None:
            return answer
        elif func is torch.Tensor.item and args[0].dtype is torch.bool and compares_truth(caller(through=_ABOUT_TEXTS)):
            return bool(super().__torch_function__(func, types, args, kwargs))  # type: ignore[attr-defined]
        elif func == _GRAD_FN and self.made_leaves and not asked_by_user(through=_ABOUT_TEXTS):
            return None  # a module that forward makes asks its parameters, which have none
        elif func in _REFUSED:
            raise CaptureError(f"{_REFUSED[func]}, which a graph does not keep")
        elif func in _READS and not isinstance(args[0], FakeTensor):
            self.tracer.reads(args[0])  # type: ignore[union-attr]
        elif func in _TEXTS and asked_by_user(through=_ABOUT_TEXTS):
            raise CaptureError("reads a tensor as text, and a graph has none")
        elif func == _DATA and (proxy := proxy_of(args[0], self.tracer)) is not None:
            return self._data(args[0], proxy)
        elif not kwargs and (results := self._sequences.called(func, args)) is not None:
            return results
        elif func in _INDEXED:
            args = (args[0], with_numbers(args[1]), *args[2:])
        elif func is torch.randint_like:  # ATen has no gradient for it, and Python takes none through it
            args = (args[0].detach(), *args[1:])
        elif (result := numbered(func, args, kwargs or {}, self.tracer)) is not None:
            return result
        elif func is torch._assert and self._asserts(*args, **(kwargs or {})):
            return None
        return super().__torch_function__(func, types, args, kwargs)

    def _is_made(self, tensor: torch.Tensor) -> bool:
        node = self._proofs.node_of(tensor)
        return node is not None and node.op == "call_function"

    def _asks(self, question: str, tensor: torch.Tensor) -> None:
        self.asked.add(question)
        if (node := self._proofs.node_of(tensor)) is None:
            return
        if question in ("strides", "exact strides"):
            refuse_guess(node, exactly=question == "exact strides")
        elif not torch.is_grad_enabled() and requires_by_layout(node):
            self.asked.add("strides")

    def _masks(self, given: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Masks of floats as the operator for inference takes them: what is not 0 masks, and nothing is added."""
        masks = {name: mask for name in _MASKS if (mask := given[name]) is not None and mask.is_floating_point()}
        plain = all(self._proofs.are_among(mask, 0.0, -math.inf) for mask in masks.values())
        return {} if plain else {name: mask.bool() for name, mask in masks.items()}

    def _data(self, tensor: torch.Tensor, proxy: torch.fx.Proxy) -> torch.Tensor:
        """x.data has a version of its own, which detach() has not: an edit of it is none that backward complains of."""
        taken = self.tracer.create_proxy("call_function", getattr, (proxy, "data"), {})  # type: ignore[union-attr]
        with disable_proxy_modes_tracing():
            twin = torch.ops.aten.detach.default(tensor)
        record(twin, taken, self.tracer)
        return twin

    def _answered(self, tensor: torch.Tensor) -> bool | None:
        """The answer to a check of data that raises nothing, or else that of the first call. The graph asks again at
        each call, and where the answer is the other one the call is eager's."""
        if not isinstance(tensor, FakeTensor) or self._proofs.is_known(tensor):
            return None
        answer = harmless_answer(caller(through=_ABOUT_TEXTS))
        if answer is None and (answer := self._answers.of(tensor)) is None:
            return None
        number = tensor.item()
        holds = number if isinstance(number, bool | torch.SymBool) else number != 0
        torch._check(holds if answer else torch.sym_not(holds))
        return answer

    def _asserts(self, condition: Any, message: str) -> bool:
        """An assert about data stays in the graph, in its place and with its error; a proved one goes."""
        node = self._proofs.node_of(condition) if isinstance(condition, FakeTensor) else None
        if node is None:
            return False
        if self._proofs.number(condition) is None:
            self.tracer.create_node("call_function", torch._assert, (node, message), {})
        return self._proofs.number(condition) != 0
