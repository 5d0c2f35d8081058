"""torch.compile, AOTInductor and ONNX Runtime, as a first user of the machine finds them: contenders, or why not.

torch.compile gets a compile of its own for each batch size, from an empty cache. The others make one package for all
batch sizes that an export leaves open.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from bench.peers import Ready, Skipped, scratch

COMPILE, TUNED, AOTI, ONNX = "torch.compile", "max-autotune", "AOTInductor", "ONNX Runtime"
TUNED_AT = 256  # the one batch size that max-autotune is asked for: it takes minutes


def compiled(
    model: nn.Module,
    args: tuple,
    limit: float,
    around: Callable[[Any], Callable[..., Any]] = lambda call: call,
    tuned: bool = False,
) -> dict[str, Ready | Skipped]:
    """torch.compile at one batch size, with its defaults and, where `tuned`, with max-autotune as well.

    Args:
        limit: seconds that each may take.
        around: what calls the compiled model.
    """
    torch._dynamo.reset()  # once: it would make the other compile again
    made = {}
    for name, mode in ((COMPILE, None), (TUNED, "max-autotune"))[: 1 + tuned]:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = scratch()
        made[name] = _ready(functools.partial(_called, around(torch.compile(model, mode=mode)), args), limit)
    return made


def packaged(model: nn.Module, args: tuple, limit: float) -> dict[str, Ready | Skipped]:
    """One package each for all batch sizes, by AOTInductor and by ONNX Runtime."""
    makers = {AOTI: _aot_inductor, ONNX: _onnx_runtime}
    return {name: _ready(functools.partial(make, model, args), limit) for name, make in makers.items()}


def answering(package: Ready | Skipped, args: tuple) -> Ready | Skipped:
    """A package, unless its export has fixed another batch size."""
    if isinstance(package, Ready):
        try:
            package.call(*args)
        except Exception as error:
            return Skipped(_first_line(error))
    return package


def _called(call: Callable[..., Any], args: tuple) -> Callable[..., Any]:
    call(*args)
    return call


def _ready(make: Callable[[], Callable[..., Any]], limit: float) -> Ready | Skipped:
    start = time.perf_counter()
    try:
        with torch.no_grad(), _within(limit):
            made = make()
    except Exception as error:
        return Skipped(_first_line(error))
    return Ready(made, time.perf_counter() - start)


def _any_batch(args: tuple) -> tuple:
    return pytree.tree_map(lambda x: {0: Dim.AUTO} if isinstance(x, torch.Tensor) and x.ndim else None, args)


def _aot_inductor(model: nn.Module, args: tuple) -> Callable[..., Any]:
    path = os.path.join(scratch(), "model.pt2")
    program = torch.export.export(model, args, dynamic_shapes=_any_batch(args), strict=False)
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    return torch._inductor.aoti_load_package(path)


def _onnx_runtime(model: nn.Module, args: tuple) -> Callable[..., Any]:
    import onnxruntime
    import onnxscript  # noqa: F401 (torch's exporter needs it, and says so less clearly)

    path = os.path.join(scratch(), "model.onnx")
    shapes = _any_batch(args)
    torch.onnx.export(model, args, path, dynamo=True, dynamic_shapes=shapes, external_data=True, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    form = pytree.tree_structure(model(*args))

    def call(*args: Any) -> Any:
        given = [leaf.numpy() for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        found = session.run(None, dict(zip(names, given, strict=True)))
        return pytree.tree_unflatten([torch.from_numpy(result) for result in found], form)

    return call


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class OutOfTime(Exception):
    """No TimeoutError, which Inductor takes for its worker's."""


@contextmanager
def _within(limit: float) -> Iterator[None]:
    """OutOfTime after `limit` seconds, where the system can send one."""

    def stop(*_: Any) -> None:
        raise OutOfTime(f"not done after {limit:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
