"""Drop-ins of exactly the model's own type, for modules that others know by it.

TorchRec's planner and sharders look for collections with ``type(module)``. A drop-in of a subclass would not be
sharded, and nobody would say so. So the class stays, and the forward is an attribute. The drop-in shares parameters,
buffers, submodules and hooks with the model; plain attributes are copied once.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.compiler import is_compiling

from fxopt.runtime.traced import while_compiling
from fxopt.torch_internals.hooks import COMPILED

if TYPE_CHECKING:
    from fxopt.runtime.dispatch import Dispatcher

_COLLECTIONS = (
    "embedding_",
    "fused_embedding_",
    "fp_embedding_",
    "mc_",
    "itep_",
    "pec_",
    "keyed_jagged_tensor_pool",
    "tensor_pool",
)
_KNOWN_BY_TYPE = ("torchrec.quant.", *(f"torchrec.modules.{name}" for name in _COLLECTIONS))


class Dispatched:
    """The forward of one module: captures where there are some, else that of its class."""

    def __init__(self, module: nn.Module, dispatcher: Dispatcher) -> None:
        self.module, self.dispatcher = module, dispatcher

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self.module).forward
        if is_compiling():  # Dynamo knows partials
            return while_compiling(self.dispatcher, functools.partial(forward, self.module), args, kwargs)
        eager = MethodType(forward, self.module)
        if self.dispatcher.original is not self.module:  # a copy for a trace
            return eager(*args, **kwargs)
        return self.dispatcher(eager, args, kwargs)


def is_known_by_type(model: nn.Module) -> bool:
    return any(base.__module__.startswith(_KNOWN_BY_TYPE) for base in type(model).__mro__)


def is_typed(model: nn.Module) -> bool:
    return isinstance(vars(model).get("forward"), Dispatched)


def bare_twin(model: nn.Module) -> nn.Module:
    """Another object of the model's type with the same attributes."""
    twin = object.__new__(type(model))
    twin.__dict__.update(vars(model))
    twin.__dict__.pop(COMPILED, None)
    return twin
