"""fxopt::gru: torch's recurrent layers on every instruction set, against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fxopt import Config, optimize
from fxopt.findings import PassFindings
from fxopt.kernels.gru import op

SIZES = [
    (1, 1, 1, 1),
    (0, 3, 2, 5),
    (1, 50, 8, 64),
    (3, 7, 5, 17),
    (5, 40, 3, 33),
    (7, 3, 8, 70),
    (50, 30, 4, 16),
    (97, 4, 2, 20),
]


def exact(gates: Tensor, initial: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = [None if tensor is None else tensor.double() for tensor in (gates, initial, weight, bias)]
    return op.gru(*wide)  # type: ignore[arg-type]


def in_graph(*arguments: Any) -> Tensor:
    return op.OPERATORS.call_of("gru")(*arguments)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
def test_is_torch_s(isa: None, sizes: tuple[int, ...], biased: bool) -> None:
    B, L, _, H = sizes
    gates, initial, weight = 3 * torch.randn(L, B, 3 * H), torch.randn(B, H), torch.randn(3 * H, H) / H**0.5
    bias = torch.randn(3 * H) if biased else None
    for call in (in_graph, torch.ops.fxopt.gru, op.gru):
        torch.testing.assert_close(
            call(gates, initial, weight, bias).double(), exact(gates, initial, weight, bias), rtol=1e-5, atol=2e-6
        )
    strided = torch.randn(B + 1, L, 3 * H + 2)[1:, :, 1:-1].transpose(0, 1), torch.randn(H, 2 * B)[:, ::2].t()
    padded = torch.randn(3 * H, H + 3)[:, 2:-1] / H**0.5
    torch.testing.assert_close(
        in_graph(*strided, padded, bias).double(), exact(*strided, padded, bias), rtol=1e-5, atol=2e-6
    )


def test_what_is_no_number_stays_in_its_row(isa: None) -> None:
    gates = torch.randn(5, 3, 12)
    gates[2, 1, 3], gates[1, 2, 5], gates[:, 0] = float("nan"), float("inf"), 1e30
    initial, weight = torch.randn(3, 4), torch.randn(12, 4)
    found, expected = in_graph(gates, initial, weight, None), op.gru(gates, initial, weight, None)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_declarations_and_refusals(isa: None) -> None:
    gates, initial, weight, bias = torch.randn(5, 3, 12), torch.randn(3, 4), torch.randn(12, 4), torch.randn(12)
    torch.library.opcheck(torch.ops.fxopt.gru.default, (gates, initial, weight, bias))
    wrong = [
        (gates[:0], initial, weight, bias), (gates[:, :2], initial, weight, bias), (gates, initial, weight[:9], bias),
        (gates, initial, weight, bias[:4]), (gates, initial[:, :3], weight, bias), (gates[0], initial, weight, bias),
        (gates.double(), initial, weight, bias), (gates, initial, weight.t().contiguous().t(), bias),
    ]  # fmt: skip
    for arguments in wrong:
        with pytest.raises(RuntimeError, match="gru"):
            in_graph(*arguments)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (1, 50, 64), (3, 7, 17), (7, 3, 70), (50, 30, 16), (97, 4, 20), (200, 9, 33)]
)
def test_packed_sequences(isa: None, sizes: tuple[int, ...], biased: bool) -> None:
    B, L, H = sizes
    lengths = torch.randint(1, L + 1, (B,)).sort(descending=True).values
    batch_sizes = (lengths > torch.arange(int(lengths[0]))[:, None]).sum(1)
    gates, initial = 3 * torch.randn(int(lengths.sum()), 3 * H + 2)[:, 1:-1], torch.randn(H, 2 * B)[:, ::2].t()
    weight, bias = torch.randn(3 * H, H + 3)[:, 2:-1] / H**0.5, torch.randn(3 * H) if biased else None
    wide = [None if tensor is None else tensor.double() for tensor in (gates, initial, weight, bias)]
    expected = op.packed_gru(wide[0], batch_sizes, *wide[1:])  # type: ignore[arg-type]
    for call in (op.OPERATORS.call_of("packed_gru"), torch.ops.fxopt.packed_gru, op.packed_gru):
        for found, exactly in zip(call(gates, batch_sizes, initial, weight, bias), expected, strict=True):
            torch.testing.assert_close(found.double(), exactly, rtol=1e-5, atol=2e-6)
            assert found.is_contiguous()


def test_refusals_of_packed_sequences(isa: None) -> None:
    gates, initial, weight = torch.randn(5, 12), torch.randn(2, 4), torch.randn(12, 4)
    torch.library.opcheck(torch.ops.fxopt.packed_gru.default, (gates, torch.tensor([2, 2, 1]), initial, weight, None))
    for sizes in ([], [2, 2], [2, 2, 2], [1, 2, 2], [2, 3], [3, 2], [2, 2, 1, 0], [3, 3, -1], [2**62, 2**62, 2**62]):
        with pytest.raises(RuntimeError):
            op.OPERATORS.call_of("packed_gru")(gates, torch.tensor(sizes, dtype=torch.int64), initial, weight, None)
    for batch_sizes in (torch.tensor([2, 2, 1]).int(), torch.tensor([[2, 2, 1]]), torch.tensor([2, 0, 2, 0, 1])[::2]):
        with pytest.raises(RuntimeError, match="number of rows"):
            op.OPERATORS.call_of("packed_gru")(gates, batch_sizes, initial, weight, None)


class Layers(nn.Module):
    def __init__(self, batch_first: bool, layers: int, bias: bool, reads: str) -> None:
        super().__init__()
        self.gru, self.reads = nn.GRU(6, 10, layers, bias, batch_first), reads

    def forward(self, x: Tensor, initial: Tensor | None = None) -> object:
        states, last = self.gru(x, initial)
        return {
            "both": (states.sum(-1), last.sum(-1)),
            "states": states.amax(1),
            "last": last[-1] * 2,
            "as they are": (states, last),
        }[self.reads]


@pytest.mark.parametrize("reads", ["both", "states", "last", "as they are"])
@pytest.mark.parametrize(
    ("batch_first", "layers", "bias", "given"), [(True, 1, True, False), (False, 2, False, True), (True, 3, True, True)]
)
def test_recurrent_layers(batch_first: bool, layers: int, bias: bool, given: bool, reads: str) -> None:
    model = Layers(batch_first, layers, bias, reads).eval()

    def inputs(batch: int, steps: int) -> tuple[Tensor, ...]:
        x = torch.randn(batch, steps, 6) if batch_first else torch.randn(steps, batch, 6)
        return (x, torch.randn(layers, batch, 10)) if given else (x,)

    with torch.no_grad():
        fast = optimize(model, inputs(5, 7), Config(tune="off"))
        for sizes in ((5, 7), (1, 1), (3, 20), (60, 4), (1, 7)):
            arguments = inputs(*sizes)
            found, expected = fast(*arguments), model(*arguments)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            if reads == "as they are":
                for mine, eager in zip(found, expected, strict=True):
                    assert mine.transpose(0, 1).is_contiguous() == eager.transpose(0, 1).is_contiguous()
        with pytest.raises(RuntimeError, match="sequence length"):
            fast(*inputs(2, 0))
    assert _ran(fast).changes


class Packed(nn.Module):
    def __init__(self, **form: Any) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 10, batch_first=True, **form)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states, last = self.gru(packed)
        return pad_packed_sequence(states, batch_first=True, total_length=x.shape[1])[0].amax(1), last


@pytest.mark.parametrize("form", [{}, {"num_layers": 3}, {"num_layers": 2, "bias": False}])
def test_recurrent_layers_over_packed_sequences(form: dict[str, Any]) -> None:
    model = Packed(**form).eval()
    with torch.no_grad():
        fast = optimize(model, (torch.randn(5, 7, 6), torch.tensor([3, 7, 1, 1, 4])), Config(tune="off"))
        for B, L in ((5, 7), (1, 1), (3, 20), (60, 4), (1, 7)):
            x, lengths = torch.randn(B, L, 6), torch.randint(1, L + 1, (B,))
            x[torch.arange(L) >= lengths[:, None]] = float("inf")
            torch.testing.assert_close(fast(x, lengths), model(x, lengths), rtol=1e-5, atol=1e-6)
    assert _ran(fast).changes
    assert len(fast._fxopt.findings) == 1


def _ran(fast: Any) -> PassFindings:
    return next(ran for ran in fast._fxopt.findings[-1].passes if ran.name == "recurrences")


def test_gradients_and_both_directions_keep_torch_s() -> None:
    for model in (Layers(True, 1, True, "last").train(), nn.GRU(6, 10, bidirectional=True).eval()):
        fast = optimize(model, (torch.randn(4, 3, 6),), Config(tune="off"))
        assert not _ran(fast).changes and _ran(fast).misses
