"""Fake results of elementwise operators are those of torch's own fake mode, and no guard is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as shape_config
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxopt.capture import capture
from fxopt.capture.inputs import FakeInputs, flatten
from fxopt.torch_internals import elementwise
from fxopt.torch_internals.known_sizes import fresh

Operator = Callable[[Tensor], Tensor]

SHORT: dict[str, Operator] = {
    "clamp": lambda x: x.clamp(0, 5),
    "clamp to floats": lambda x: x.clamp(0.5, 5),
    "clamp one end": lambda x: x.clamp_min(1),
    "add": lambda x: x + 1,
    "add a float": lambda x: x + 1.5,
    "rsub": lambda x: 1 - x,
    "mul": lambda x: x * x,
    "div": lambda x: x / 2,
    "div, rounded": lambda x: torch.div(x, 2, rounding_mode="floor"),
    "remainder": lambda x: x % 7,
    "compare": lambda x: x > 0,
    "where": lambda x: torch.where(x > 0, x, 0),
    "where, a float": lambda x: torch.where(x > 0, 0.5, x),
    "masked_fill": lambda x: x.masked_fill(x == 0, 1),
    "0-dim": lambda x: torch.where(x > 0, x, x.new_empty(())),
    "other dtype": lambda x: x + x.to(torch.float64),
    "sqrt": lambda x: x.sqrt(),
    "and": lambda x: (x > 0) & (x < 5),
    "bits": lambda x: (x > 0).bitwise_not(),
    "isnan": lambda x: x.isnan(),
    "one row": lambda x: x * x[0],
    "rows and columns": lambda x: x.new_empty(x.shape[0], 1) + x.new_empty(1, x.shape[1]),
    "each with each": lambda x: x.unsqueeze(2) == torch.arange(7),
    "columns": lambda x: x.new_empty(x.shape[0], 9)[:, 2:5].clamp(0, 5),
    "a column": lambda x: x.new_empty(x.shape[0], 9)[:, 2] + 1,
}
LONG: dict[str, Operator] = {
    "constant": lambda x: x * torch.tensor(2.0, dtype=torch.float64),
    "transposed": lambda x: x.t() + 1,
    "sliced": lambda x: x[:, 1:].clamp(0, 5),
    "expanded": lambda x: x[0].expand(6, -1) + 1,
}


def traced(operator: Operator, dtype: torch.dtype) -> tuple[object, ...]:
    """What is known about the result for symbolic sizes, and what was asked to know it."""
    inputs = flatten((torch.ones(4, 3, dtype=dtype),), {})
    with shape_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        fakes = FakeInputs(inputs, ((4, 3),), set(), set())
        with fakes.fake_mode, enable_python_dispatcher():
            y = operator(fakes.tensors[0])
    asked = [str(guard.expr) for guard in fakes.shape_env.guards]
    return y.dtype, y.device, str(tuple(y.shape)), str(y.stride()), asked


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [*SHORT, *LONG])
def test_as_torch(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = {**SHORT, **LONG}[name]
    short = elementwise.CaptureFakeMode._elementwise
    taken = []

    def watched(*args: object) -> object:
        found = short(*args)  # type: ignore[arg-type]
        taken.append(found is not None)
        return found

    monkeypatch.setattr(elementwise.CaptureFakeMode, "_elementwise", watched)
    found = traced(operator, dtype)
    assert taken and all(taken) == (name in SHORT)
    assert found[0] == operator(torch.ones(4, 5, dtype=dtype)).dtype
    monkeypatch.setattr(elementwise.CaptureFakeMode, "dispatch", FakeTensorMode.dispatch)
    assert found == traced(operator, dtype)


def test_what_torch_rejects_is_rejected() -> None:
    with pytest.raises((RuntimeError, ValueError), match="min and max"):
        traced(lambda x: torch.clamp(x), torch.float32)


_ROW_BY_ROW = {
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1])),
    "batch_norm in training": lambda x: F.batch_norm(x, None, None, training=True),
    "logsigmoid": F.logsigmoid,
    "rrelu": F.rrelu,
}
_FORMS = {
    "transposed matrix": lambda: torch.randn(4, 6).t(),
    "expanded": lambda: torch.randn(6, 1).expand(6, 4),
    "every other": lambda: torch.randn(6, 8)[:, ::2],
    "outer axes turned": lambda: torch.randn(5, 6, 4).transpose(0, 1),
    "inner axes turned": lambda: torch.randn(6, 4, 5).transpose(1, 2),
    "reversed": lambda: torch.randn(4, 5, 6).permute(2, 1, 0),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("name", _ROW_BY_ROW)
def test_strides_as_the_cpu_has_them(name: str, form: str, grad: bool) -> None:
    x = _FORMS[form]()
    mode = elementwise.CaptureFakeMode(ShapeEnv(), cached=True)
    with mode, torch.set_grad_enabled(grad):
        fake = _ROW_BY_ROW[name](mode.from_tensor(x).requires_grad_(grad))
    assert tuple(map(int, fake.stride())) == _ROW_BY_ROW[name](x).stride()


def test_gru_cells_of_a_gpu_have_fake_results() -> None:
    mode, device = elementwise.CaptureFakeMode(ShapeEnv(), cached=True), torch.device("cuda", 0)

    def fake(*sizes: int) -> Tensor:
        return fresh(mode, sizes, torch.float32, device)

    with mode:
        hidden = torch.gru_cell(fake(3, 6), fake(3, 5), fake(15, 6), fake(15, 5), fake(15), fake(15))
    assert hidden.shape == (3, 5), "torch's aten._thnn_fused_gru_cell has other arguments than it had"
    assert hidden.device == device


def test_products_with_a_sparse_matrix_have_fake_results_of_any_size() -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.edges = torch.eye(6).to_sparse_coo()

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.edges, x)

    x = torch.randn(6, 4)
    (found,) = capture(Spread(), (x,)).graph(x)
    assert torch.equal(found, x), "torch's aten._sparse_addmm has other arguments than it had"
