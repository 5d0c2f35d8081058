"""Optimizers that step inside backward(): at its end, the rows of tables that have a gradient are updated.

    tables, others = fxopt.optimizers.split(model)
    rows = fxopt.optimizers.RowwiseAdagrad(tables, lr=0.05)  # from now on backward() updates the tables
    dense = torch.optim.Adam(others)

    loss(model(*batch)).backward()
    dense.step()

Only the rows that a batch touches are read and written, and no gradient of a whole table is made where fxopt's columns
compute it: for tables of a million rows that is most of a training step. The idea is FBGEMM's and TorchRec's;
`torchrec.optim.apply_optimizer_in_backward(RowwiseAdagrad, params, {"lr": 0.05})` works too. (Optimizers of torch and
TorchRec that it hangs on tables step on the rows of a batch as well, without this module: docs/training.md.)

What a row gets is exact: autograd first adds the gradients of everything that read the table in this backward
(columns, several calls of the model, eager operators), then there is one update a row. A row whose gradient is zero
stays as it is, so the result does not depend on who computed the gradient.

What follows from stepping in backward: every backward() is a step, so gradients cannot be accumulated over several of
them, clipped by a norm over all parameters, or unscaled by a GradScaler (do not scale the loss); `zero_grad()` has
nothing to do, `param.grad` is None after it. A hook of yours behind a table's gradient still sees the old table, and a
backward that fails may have updated none. A `torch.autograd.grad` for a table updates nothing, and is sparse. Segments
of `torch.utils.checkpoint(use_reentrant=True)` are backwards of their own. Where two forwards run before their two
backwards, the second one raises: the tables that it read have changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from fxopt.kernels.columns import row_gradients
from fxopt.kernels.row_update.op import OPERATORS, Kind, constants
from fxopt.torch_internals.autograd import at_the_end_of_backward, running_backward
from fxopt.torch_internals.cuda import current_raw_stream

_DTYPES = (torch.float32, torch.float64)
_MOST_BYTES = 1 << 26  # of gradients that wait for the end of a backward; where each comes alone, memory is what limits


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trained parameters of a model: float weights of nn.Embedding and nn.EmbeddingBag, and all others."""
    tables = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.weight.dtype in _DTYPES
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [p for p in trained if id(p) in tables], [p for p in trained if id(p) not in tables]


class InBackward(torch.optim.Optimizer):
    """What the optimizers below share. State and options are where every torch optimizer has them: `state_dict()`,
    `load_state_dict()`, `param_groups[0]["lr"]`, learning rate schedulers.

    Args:
        params: leaves [R, D], float32 or float64, contiguous; as every torch optimizer takes them.

    Raises:
        ValueError: a parameter is none of these, is listed twice, or has an optimizer in backward already.
        RuntimeError: in backward(), for `create_graph=True`, and for a gradient of one rank of several (see `_refuse`).
    """

    kind: Kind

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._attached: list[tuple[Tensor, Any]] = []
        self._found: WeakValueDictionary[int, _Found] = WeakValueDictionary()  # of each backward, which owns its own
        OPERATORS.compiled()
        try:
            super().__init__(params, defaults)
        except Exception:
            self.detach()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_attached", [])  # a copy's parameters are others: its step() applies their gradients
        self.__dict__.setdefault("_found", WeakValueDictionary())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]["params"]
        try:
            if len(set(map(id, group))) < len(group):
                raise ValueError("a table is listed twice, where one backward() is one step of it")
            for table in group:
                _check(table)
        except ValueError:
            self.param_groups.pop()
            raise
        for table in group:
            row_gradients.want(table)
            step = functools.partial(self._accumulated, len(self.param_groups) - 1)
            self._attached.append((table, table.register_post_accumulate_grad_hook(step)))

    def detach(self) -> None:
        """From now on gradients stay in `.grad`, dense, for another optimizer.

        Until then an optimizer and its tables keep each other alive: torch's garbage collector does not see the hook.
        """
        for table, handle in self._attached:
            handle.remove()
            row_gradients.unwant(table)
        self._attached.clear()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Applies what is left in `.grad`: nothing after a backward(). Here for code that steps all its optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = _Found(self)
        for number, group in enumerate(self.param_groups):
            for table in group["params"]:
                if table.grad is not None:
                    found.take(number, table)
        found.apply()
        return loss

    def _accumulated(self, number: int, table: Tensor) -> None:
        if table.grad is None:  # it was frozen after the forward
            return
        _refuse(table)
        self._opt_called = True  # or learning rate schedulers miss step()
        backward = running_backward()
        found = self._found.get(backward)
        if found is None:
            found = self._found[backward] = _Found(self)
            at_the_end_of_backward(found.apply)
        found.take(number, table)

    @torch.no_grad()
    def _apply(self, number: int, tables: Sequence[Tensor], rows: list[Tensor], grads: list[Tensor]) -> None:
        """One step of tables of one group, device, dtype and number of steps."""
        group = self.param_groups[number]
        states = [self._state_of(table) for table in tables]
        for state in states:
            if "step" in state:
                _refuse_capture(tables[0])
                state["step"] += 1
        tensors = [value for state in states for name, value in state.items() if name != "step"]
        numbers = self._constants(group, states[0])
        torch.ops.fxopt.row_update([t.detach() for t in tables], tensors, rows, grads, numbers, int(self.kind))
        torch.autograd.graph.increment_version(tables)

    def _state_of(self, table: Tensor) -> dict[str, Any]:
        state = self.state[table]
        if not state:
            state.update(self._first_state(table))
        return state

    def _first_state(self, table: Tensor) -> dict[str, Tensor]:
        return {}

    def _constants(self, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return constants(float(group["lr"]))


class _Found:
    """The rows that have a gradient, of the tables of an optimizer: one launch updates many."""

    def __init__(self, optimizer: InBackward) -> None:
        self._optimizer = optimizer
        self._taken: list[tuple[int, Tensor, int, Tensor, Tensor]] = []  # group, table, stream, rows, gradients
        self._bytes = 0

    def take(self, number: int, table: Tensor) -> None:
        """The gradient of a table of group `number`, which is then no longer in `.grad`."""
        rows, grads = row_gradients.rows_of(table)
        self._taken.append((number, table, _stream_of(table), rows, grads))
        table.grad = None
        self._bytes += grads.nbytes
        if self._bytes > _MOST_BYTES:
            self.apply()

    def apply(self) -> None:
        taken, self._taken, self._bytes = self._taken, [], 0
        alike: dict[tuple, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for number, table, stream, rows, grads in taken:
            if stream != _stream_of(table):  # made on another one, which is not to reuse the memory before the update
                for tensor in (rows, grads):
                    tensor.record_stream(torch.cuda.current_stream(table.device))
            key = number, table.device, table.dtype, int(self._optimizer._state_of(table).get("step", 0))
            alike.setdefault(key, []).append((table, rows, grads))
        for (number, *_), found in alike.items():
            self._optimizer._apply(number, *map(list, zip(*found, strict=True)))


def _stream_of(table: Tensor) -> int:
    return current_raw_stream(table.get_device()) if table.is_cuda else 0


class SGD(InBackward):
    """w -= lr g, for each row w with gradient g. Plain torch.optim.SGD, and FBGEMM's EXACT_SGD."""

    kind = Kind.SGD

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": _positive("lr", lr)})


class RowwiseAdagrad(InBackward):
    """s += mean(g^2); w -= lr g / (sqrt(s) + eps), with one number s a row.

    FBGEMM's EXACT_ROWWISE_ADAGRAD and torchrec.optim.RowWiseAdagrad. State: "sum" [R].
    """

    kind = Kind.ROWWISE_ADAGRAD

    def __init__(self, params: Any, lr: float = 1e-2, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": _positive("lr", lr), "eps": _positive("eps", eps)})

    def _first_state(self, table: Tensor) -> dict[str, Tensor]:
        return {"sum": table.new_zeros(table.shape[0])}

    def _constants(self, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return constants(float(group["lr"]), group["eps"])


class Adam(InBackward):
    """m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w -= lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps), for the
    rows that have a gradient: the others' moments do not decay. t counts the steps of the table, not of the row.

    FBGEMM's ADAM (Kingma and Ba, ICLR 2015, on the rows of a batch). torch.optim.SparseAdam is the same but for eps,
    which it adds before the correction. State: "step", "exp_avg" and "exp_avg_sq" [R, D].
    """

    kind = Kind.ADAM

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas: expected numbers in [0, 1), found {betas}")
        super().__init__(params, {"lr": _positive("lr", lr), "betas": tuple(betas), "eps": _positive("eps", eps)})

    def _first_state(self, table: Tensor) -> dict[str, Tensor]:
        moments = {name: torch.zeros_like(table) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.tensor(0.0, device="cpu"), **moments}

    def _constants(self, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        return constants(float(group["lr"]), group["eps"], group["betas"], int(state["step"]))


def _positive(name: str, value: float) -> float:
    if not value >= 0:
        raise ValueError(f"{name}: expected a number >= 0, found {value}")
    return value


def _check(table: Tensor) -> None:
    fits = table.dim() == 2 and table.dtype in _DTYPES and table.is_contiguous() and table.requires_grad
    if not fits:
        raise ValueError(
            "an optimizer in backward takes tables: expected contiguous [R, D] in float32 or float64 that require "
            f"grad, found {list(table.shape)}, {table.dtype}, requires_grad={table.requires_grad}"
        )
    if row_gradients.wanted(table):
        raise ValueError("this table has an optimizer in backward already: detach() that one first")


def _refuse(table: Tensor) -> None:
    """What would be a wrong update: one that is differentiated, or of one rank's gradient alone."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "fxopt.optimizers: no backward(create_graph=True) while an optimizer steps in it; detach() it"
        )
    if _ranks() > 1 and not getattr(table, "_ddp_ignored", False):
        raise RuntimeError(
            "fxopt.optimizers: among several ranks the gradient of this one alone would be applied. Where that is "
            "meant, as for a table that only this rank has, say so by DistributedDataParallel."
            "_set_params_and_buffers_to_ignore_for_model(module, names)"
        )


def _refuse_capture(table: Tensor) -> None:
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("fxopt.optimizers: Adam counts its steps on the host, so a CUDA graph would repeat one step")


def _ranks() -> int:
    group = torch.distributed
    return group.get_world_size() if group.is_available() and group.is_initialized() else 1
