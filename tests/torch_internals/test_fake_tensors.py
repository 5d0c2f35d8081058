"""Fake tensors belong to a mode, and raise known errors where a graph would need data."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from fxopt.torch_internals.fake_tensors import (
    DATA_DEPENDENT,
    FakeTensor,
    FakeTensorMode,
    as_parameter,
    is_of_a_key,
    is_of_nested,
    mode_of,
    quieten,
)
from fxopt.torch_internals.tracing import make_fx


def test_a_fake_tensor_has_its_mode(x: Tensor, fake_mode: FakeTensorMode) -> None:
    assert isinstance(x, FakeTensor) and mode_of(x) is fake_mode and mode_of(torch.ones(1)) is None, (
        "FakeTensor.fake_mode: fxopt/rewrites/framework/editor.py works out new nodes in the mode of the old ones"
    )


def test_what_depends_on_data_raises(fake_mode: FakeTensorMode) -> None:
    with FakeTensorMode() as mode:
        y = torch.ones(3)
        for ask in (lambda: y.sum().item(), lambda: y.nonzero(), lambda: bool(y.sum() > 0)):
            with pytest.raises(DATA_DEPENDENT):
                ask()
    assert mode is not fake_mode
    with fake_mode, pytest.raises(DATA_DEPENDENT):
        bool(torch.ones(3).sum() > 0)


def test_a_number_that_data_tells_has_no_place_in_a_dict(fake_mode: FakeTensorMode) -> None:
    with fake_mode:
        number = torch.ones(3).sum().long().item()
    with pytest.raises(TypeError) as raised:
        hash(number)
    assert is_of_a_key(raised.value), f"SymInt.__hash__ says {raised.value}: the report would, too"
    assert not is_of_a_key(TypeError("unhashable type: 'list'"))


def test_torchs_own_code_of_nested_tensors_raises_in_a_trace(fake_mode: FakeTensorMode) -> None:
    def nested(x: Tensor) -> Tensor:
        return torch.nested.nested_tensor([x, x], layout=torch.jagged)

    with pytest.raises(RuntimeError) as raised:
        make_fx(nested, pre_dispatch=True)(torch.ones(3))
    assert is_of_nested(raised.value), "torch.nested has moved: a report would speak of proxies"
    assert not is_of_nested(RuntimeError("of something else"))


def test_a_fake_can_be_a_parameter(x: Tensor) -> None:
    as_parameter(x)
    assert isinstance(x, nn.Parameter), "_is_param no longer makes a parameter: a model that asks is traced wrongly"


def test_logs_can_be_kept_back() -> None:
    seen: list[str] = []
    quieten(lambda record: not seen.append(record.name))
    for name in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes"):
        found = logging.getLogger(name)
        found.handle(found.makeRecord(name, 50, "", 0, "", (), None))
        found.filters.pop()
    assert len(seen) == 2
    import torch._subclasses.fake_tensor as theirs
    import torch.fx.experimental.symbolic_shapes as others

    assert [theirs.log.name, others.log.name] == seen, "torch logs under other names: captures fill the user's log"
