"""pack_padded_sequence, recurrent layers and pad_packed_sequence: one capture for all sizes, with eager's results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fxopt import Config, optimize, report
from fxopt.runtime import dispatcher_of

CONFIG = Config(tune="off")
SIZES = ((4, 7), (1, 3), (6, 1), (1, 1), (3, 20), (60, 9))
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "both ways": {"bidirectional": True},
    "two layers": {"num_layers": 2, "bias": False},
}


class Model(nn.Module):
    """reads: what of the layer's results is used."""

    def __init__(
        self,
        kind: type[nn.RNNBase] = nn.GRU,
        reads: str = "all",
        total: bool = True,
        ordered: bool = False,
        **form: Any,
    ) -> None:
        super().__init__()
        self.layer = kind(5, 3, **form)
        self.reads, self.total, self.ordered = reads, total, ordered

    def forward(self, x: Tensor, lengths: Any, initial: Any = None) -> Any:
        first = self.layer.batch_first
        packed = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=self.ordered)
        if self.reads == "data":
            packed = PackedSequence(packed.data * 2, *packed[1:])
            return self.layer(packed, initial)[0].data.tanh(), packed.batch_sizes + 1
        states, last = self.layer(packed, initial)
        if self.reads == "last":
            return (last[0] if isinstance(last, tuple) else last) * 2
        if self.reads == "packed":
            return states
        length = x.shape[1 if first else 0] if self.total else None
        padded, again = pad_packed_sequence(states, batch_first=first, padding_value=-1.0, total_length=length)
        return padded * 2 if self.reads == "states" else (padded * 2, again, last)


def inputs(model: Model, batch: int, length: int, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Behind its end a sequence holds what is no number."""
    lengths = torch.randint(1, length + 1, (batch,), dtype=dtype)
    if model.ordered:
        lengths = lengths.sort(descending=True).values
    x = torch.randn(batch, length, 5)
    x[torch.arange(length) >= lengths[:, None]] = float("nan")
    return (x if model.layer.batch_first else x.transpose(0, 1).contiguous()), lengths


def tensors(results: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(results) if isinstance(leaf, Tensor)]


def captures(model: nn.Module) -> int:
    """How many served, none of which stayed eager or has opaque parts."""
    entries = dispatcher_of(model).entries
    assert all(entry.executable is not None and not entry.executable.capture.leaves for entry in entries)
    return len(entries)


@pytest.mark.parametrize("total", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_one_capture_for_all_sizes(kind: type[nn.RNNBase], form: str, total: bool) -> None:
    model = Model(kind, total=total, batch_first=True, **FORMS[form]).eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    with torch.no_grad():
        for sizes in SIZES:
            given = inputs(model, *sizes)
            torch.testing.assert_close(fast(*given), model(*given))
    assert captures(fast) == 1


@pytest.mark.parametrize("reads", ["all", "states", "last", "data", "packed"])
@pytest.mark.parametrize(
    ("first", "ordered", "dtype"), [(True, False, torch.int32), (False, False, torch.int64), (True, True, torch.int64)]
)
def test_forms_of_calls(reads: str, first: bool, ordered: bool, dtype: torch.dtype) -> None:
    model = Model(reads=reads, ordered=ordered, batch_first=first, num_layers=2).eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    with torch.no_grad():
        for sizes in SIZES:
            given = (*inputs(model, *sizes, dtype), torch.randn(2, sizes[0], 3))
            found, expected = fast(*given), model(*given)
            torch.testing.assert_close(found, expected)
            assert type(found) is type(expected)
            assert [each.stride() for each in tensors(found)] == [each.stride() for each in tensors(expected)]
    assert captures(fast) == 1


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_training(kind: type[nn.RNNBase]) -> None:
    model = Model(kind, batch_first=True, num_layers=2, dropout=0.4)
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    for sizes in SIZES:
        x, lengths = inputs(model, *sizes)
        outcomes = []
        for each in (fast, model):
            given = x.clone().requires_grad_()
            torch.manual_seed(0)
            each.zero_grad(set_to_none=True)
            results = tensors(each(given, lengths))
            sum(result.sum() for result in results if result.is_floating_point()).backward()  # type: ignore[union-attr]
            outcomes.append([*results, given.grad, *(parameter.grad for parameter in each.parameters())])
        torch.testing.assert_close(*outcomes)
    assert captures(fast) == 1


def test_inference_mode() -> None:
    """Nobody counts the edits of a tensor that was made there."""
    model = Model()
    fast = optimize(model, config=CONFIG)
    with torch.inference_mode():
        for rows, steps in SIZES[:3]:
            call = inputs(model, rows, steps)
            torch.testing.assert_close(tensors(fast(*call)), tensors(model(*call)))
    assert captures(fast) == 1


def test_lengths_in_a_list_and_all_alike() -> None:
    model = Model(batch_first=True).eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    with torch.no_grad():
        for lengths in ([4, 4, 4], [1, 4, 2], torch.tensor([4, 4, 4]), torch.tensor([2, 2, 2])):
            x = torch.randn(3, 4, 5)
            torch.testing.assert_close(fast(x, lengths), model(x, lengths))
    assert captures(fast) == 3  # a number in a list is one of the signature


@pytest.mark.parametrize("ordered", [False, True])
def test_errors_are_eagers(ordered: bool) -> None:
    model = Model(ordered=ordered, batch_first=True).eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    x = torch.randn(3, 4, 5)
    with torch.no_grad():
        fast(x, torch.tensor([4, 2, 1]))
        bad = ([0, 1, 2], [2, 1, 0], [2, 1, 5], [5, 2, 1], [1, 2, 3], [2, 1], [4, 3, 2, 1], [-1, 2, 3])
        found, expected = ([outcome(each, x, torch.tensor(lengths)) for lengths in bad] for each in (fast, model))
        assert found == expected
        assert len({str(each) for each in expected}) >= 3
        assert outcome(fast, x[:0], torch.zeros(0).long()) == outcome(model, x[:0], torch.zeros(0).long())
        torch.testing.assert_close(fast(x, torch.tensor([3, 2, 2])), model(x, torch.tensor([3, 2, 2])))
    assert captures(fast) >= 1


def outcome(model: nn.Module, *given: Any) -> Any:
    try:
        return [each.shape for each in tensors(model(*given))]
    except (RuntimeError, ValueError, IndexError) as error:
        return f"{type(error).__name__}: {error}"


class Cut(nn.Module):
    """Pads to a length of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(5, 3, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=6)[0].sum(1)


def test_a_total_length_that_is_too_short_is_eagers_error() -> None:
    model = Cut().eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    with torch.no_grad():
        for lengths in ([3, 6], [1, 8], [2, 2]):
            given = torch.randn(2, 8, 5), torch.tensor(lengths)
            expected = outcome(model, *given)
            assert outcome(fast, *given) == expected and (8 in lengths) == ("total_length" in expected)
    assert captures(fast) == 1


class Around(nn.Module):
    """A layer within others, some of which stay opaque."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.linear = layer, nn.Linear(5, 5)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.linear(x), lengths, batch_first=True, enforce_sorted=False)
        return self.linear(pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])


class Stepwise(nn.Module):
    """As the recurrences of DIEN: a loop over the batch sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(5, 5)

    def forward(self, packed: PackedSequence) -> tuple[PackedSequence]:
        state, states, at = packed.data.new_zeros(int(packed.batch_sizes[0]), 5), [], 0
        for size in packed.batch_sizes:
            state = self.cell(packed.data[at : at + size], state[:size])
            states.append(state)
            at += int(size)
        return (PackedSequence(torch.cat(states), *packed[1:]),)


def hooked() -> nn.Module:
    layer = nn.GRU(5, 5)
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Stepwise(), "depends on data"),
        (hooked(), "has forward or backward hooks"),
        (nn.LSTM(5, 7, proj_size=5), "a recurrent layer with a projection"),
    ],
    ids=["stepwise", "hooked", "projected"],
)
def test_opaque_layers(layer: nn.Module, reason: str) -> None:
    model = Around(layer).eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    with torch.no_grad():
        for batch, length in SIZES:
            given = torch.randn(batch, length, 5), torch.randint(1, length + 1, (batch,))
            torch.testing.assert_close(fast(*given), model(*given))
    for signature in report(fast).signatures:
        assert not signature.eager_reason and [reason in leaf.text for leaf in signature.leaves] == [True]


def test_autocast_keeps_the_layer() -> None:
    model = Around(nn.GRU(5, 5)).eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for batch, length in SIZES:
            given = torch.randn(batch, length, 5), torch.randint(1, length + 1, (batch,))
            torch.testing.assert_close(fast(*given), model(*given))
    (signature,) = report(fast).signatures
    assert "under autocast" in signature.leaves[0].text


class Given(nn.Module):
    """Of a packed sequence that the caller has made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(5, 3)

    def forward(self, packed: PackedSequence) -> tuple[Tensor, Tensor]:
        states, (last, _) = self.layer(packed)
        return pad_packed_sequence(states)[0] * 2, last.tanh()


class Edited(nn.Module):
    """Takes some of the sequences away."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(5, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths)
        packed.batch_sizes.sub_(1)
        return self.layer(PackedSequence(packed.data[: packed.batch_sizes.sum()], packed.batch_sizes))[1] * 2


def test_batch_sizes_that_are_edited() -> None:
    model = Edited().eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    with torch.no_grad():
        for batch, length in ((4, 3), (2, 5), (6, 1)):
            given = torch.randn(length, batch, 5), torch.full((batch,), length)
            torch.testing.assert_close(fast(*given), model(*given))


def test_packed_sequences_as_inputs() -> None:
    model = Given().eval()
    fast = optimize(copy.deepcopy(model), config=CONFIG)
    with torch.no_grad():
        for batch, length in SIZES:
            lengths = torch.randint(1, length + 1, (batch,))
            packed = pack_padded_sequence(torch.randn(length, batch, 5), lengths, enforce_sorted=False)
            torch.testing.assert_close(fast(packed), model(packed))
    assert captures(fast) == 1
