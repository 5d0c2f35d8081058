"""Operators of ours: defined on first use, in PyTorch; on the CPU a compiled kernel serves, where it can be had."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

from fxopt.facts import UNKNOWN, Facts, declare
from fxopt.locks import lock
from fxopt.torch_internals.autograd import making_no_views
from fxopt.torch_internals.operators import destroy, has_kernel, parse_schema

from . import entry, gradients, shims, simd
from .build import Library
from .cache import BuildError
from .cuda_build import CudaLibrary
from .recorded import recorded

BY_ROWS = Facts(rows="first")  # of most operators
_defined: list[Operator] = []
NO_PLAN = torch.zeros(0, dtype=torch.int64, device="cpu")  # of operators that are told everything by their tensors


def cpu_library(
    folder: Path, shared: str, kernels: str, schemas: Sequence[str] = (), cflags: Sequence[str] = ()
) -> Library:
    """The library of the kernels in `folder`: their header for each instruction set, and cpu.cpp around it.

    Its functions are `fxopt_NAME_run(const Request*)`, an operator each, and for tests `fxopt_FOLDER_isa(name)`.

    Args:
        shared, kernels: headers of the folder, as :func:`.simd.sources` takes them.
        schemas: of the operators that C++ may call: :mod:`.shims` writes the ways to their functions.
        cflags: besides those of all kernels.
    """
    return Library(
        f"fxopt_{folder.name}",
        sources=(folder / "cpu.cpp",),
        schemas=tuple(schemas),
        cflags=(*simd.CFLAGS, "-Wno-psabi", *cflags, entry.STABLE_ABI),
        written=(*simd.sources(f"{folder.name}/{shared}", f"{folder.name}/{kernels}"), *shims.sources(schemas)),
    )


@dataclass(frozen=True)
class Operator:
    """One operator.

    Attributes:
        schema: what torch.library.define takes.
        forward: in PyTorch, on any device; None: there is only the kernel.
        fake: its shapes. None: forward is a composition of torch's operators, which has them.
        backward, setup_context: what torch.library.register_autograd takes; an output without a gradient has None.
        others: for a dispatch key each.
        facts: what graphs may take for granted of it.
    """

    schema: str
    forward: Callable | None = None
    fake: Callable | None = None
    backward: Callable | None = None
    setup_context: Callable | None = None
    others: Mapping[str, Callable] = field(default_factory=dict)
    facts: Facts = UNKNOWN

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    def in_cpp_on(self, key: str) -> bool:
        """Whether a library registered a kernel for a dispatch key."""
        return key not in self.others and has_kernel(f"fxopt::{self.name}", key)

    def define(self, library: torch.library.Library) -> None:
        name = self.name
        declare(name, self.facts)
        if not hasattr(torch.ops.fxopt, name):  # a bundle (fxopt/export/bundle.py) may have defined it
            library.define(self.schema, tags=(torch.Tag.pt2_compliant_tag,))
        if self.forward is not None:
            composite = "CompositeImplicitAutograd" if self.fake is None else "CompositeExplicitAutograd"
            library.impl(name, self.forward if self.fake is None else _owning(self.forward), composite)
        for key, function in self.others.items():
            library.impl(name, function, key)
        if self.fake is not None:
            torch.library.register_fake(f"fxopt::{name}", self.fake, lib=library)
        if self.backward is not None:
            backward = self.gradients_of
            torch.library.register_autograd(f"fxopt::{name}", backward, setup_context=self.set_up, lib=library)

    def set_up(self, ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.set_materialize_grads(False)
        if self.setup_context is not None:
            self.setup_context(ctx, inputs, output)

    @functools.cached_property
    def gradients_of(self) -> Callable[..., tuple]:
        """Its backward, which is not asked where no gradient flows."""
        assert self.backward is not None
        return gradients.where_they_flow(self.backward)

    @property
    def gives_list(self) -> bool:
        return self.schema.endswith("-> Tensor[]")

    def python(self) -> str:
        """A function of its arguments, past the dispatcher where that can be: the kernel takes tensors and a plan."""
        types = {each.name: str(each.real_type) for each in parse_schema(f"fxopt::{self.schema}").arguments}
        tensors = ", ".join(name for name, kind in types.items() if "Tensor" in kind)
        return (
            f"def fxopt_{self.name}({', '.join(types)}):\n"
            f"    _outputs = _way({tensors}, _plan)\n"
            f"    if _outputs is None:\n"
            f"        return _recorded({', '.join(types)})\n"
            f"    return _outputs{'[0]' if self.schema.endswith('-> Tensor') else ''}\n"
        )


def _owning(forward: Callable) -> Callable:
    """`forward`, whose last step may be a view: of memory that nobody else knows, so that the caller may edit it."""

    @functools.wraps(forward)
    def own(*args: Any) -> Any:
        with making_no_views():
            return forward(*args)

    return own


class Operators:
    """Operators that share a kernel library; without one, `kernel` is None, they are PyTorch's alone.

    cuda: the library of their calls on CUDA, where there is one for all of them.
    """

    def __init__(
        self, operators: Sequence[Operator], kernel: Library | None = None, cuda: CudaLibrary | None = None
    ) -> None:
        self._operators = operators
        self._named = {operator.name: operator for operator in operators}
        self._kernel = kernel
        self.cuda = cuda
        self._lock = lock()
        self._library: torch.library.Library | None = None
        self._tried = False
        self._path: Path | None = None
        self._ways: dict[str, Callable] = {}

    def load(self) -> None:
        """Defines the operators, once."""
        with self._lock:
            if self._library is None:
                self._library = defined(self._define)

    def _define(self, library: torch.library.Library) -> None:
        for operator in self._operators:
            operator.define(library)
        _defined.extend(self._operators)

    def compiled(self) -> bool:
        """Whether the kernels are there, compiling them at the first call."""
        if not self._tried:
            with self._lock:
                self.load()
                if not self._tried:
                    self._path, self._tried = self._register(), True
        return self._path is not None

    def _register(self) -> Path | None:
        if self._kernel is None:
            return None
        try:
            return entry.register(self._kernel)
        except (BuildError, OSError) as error:
            message = f"fxopt: {self._kernel.name} runs in PyTorch, without the compiled kernel: {error}"
            warnings.warn(message, stacklevel=4)
            return None

    def recorded(self, name: str, *arguments: Any, call: Callable[..., Any] | None = None) -> Any:
        """The operator where :meth:`past_dispatcher` gives None; while gradients are on, with those it has.

        call: the same, for those who know a shorter way.
        """
        call, operator = call or getattr(torch.ops.fxopt, name), self._named[name]
        records = torch.is_grad_enabled() and operator.backward is not None
        return recorded(operator, call, arguments) if records else call(*arguments)

    def call_of(self, name: str, plan: torch.Tensor = NO_PLAN) -> Callable[..., Any]:
        """An operator for a graph that runs: of all its arguments, past the dispatcher where it can be.

        plan: what its kernel is told of the arguments behind the tensors.
        """
        recorded = functools.partial(self.recorded, name)
        space: dict[str, Any] = {
            "__name__": __name__,
            "_way": self.past_dispatcher(name),
            "_plan": plan,
            "_recorded": recorded,
        }
        exec(self._named[name].python(), space)  # with arguments of its own: to pass on any number takes 0.2 us more
        return space[f"fxopt_{name}"]

    def past_dispatcher(self, name: str) -> Callable[..., Any]:
        """The way into an operator's kernel that costs 1 us: of its tensors, lists of tensors, and last the plan.

        It returns a list of tensors, or None: the dispatcher has to be asked.
        """
        found = self._ways.get(name)
        if found is None:
            found = self._ways[name] = self._bound(name)
        return found

    def _bound(self, name: str) -> Callable:
        if not self.compiled():
            return _no_way
        assert self._path is not None
        return entry.bind(self._path, f"fxopt_{name}_run") or _no_way


def definitions_on(device: str) -> dict[OpOverload, Callable[..., Any]]:
    """What PyTorch computes for the operators, of those defined so far, that C++ does not serve on a type of device."""
    return {
        getattr(torch.ops.fxopt, operator.name).default: operator.forward
        for operator in _defined
        if operator.forward is not None and not operator.in_cpp_on(device.upper())
    }


def defined(define: Callable[[torch.library.Library], None]) -> torch.library.Library:
    """A library of fxopt's operators: all that `define` adds to it, or, where it raises, none."""
    library = torch.library.Library("fxopt", "FRAGMENT")
    try:
        define(library)
    except BaseException:
        destroy(library)
        raise
    return library


def _no_way(*arguments: object) -> None:
    return None
