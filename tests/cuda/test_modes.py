"""Config.bad_ids on its way into the plan; what the modes do is tested through the shim and on a GPU."""

from __future__ import annotations

import pytest
import torch

import fxopt
from fxopt.config import BAD_IDS
from fxopt.kernels.columns.autograd import _make_split
from fxopt.kernels.columns.encode import decode, encode, plan_of
from fxopt.kernels.columns.plan import Column, Plan, Source
from fxopt.runtime import dispatcher_of
from tests.cuda.compare import Two


@pytest.mark.parametrize("mode", BAD_IDS)
def test_the_plan_of_a_model_holds_its_mode(mode):
    ids, model = torch.randint(0, 10, (5, 2)), Two()
    with torch.no_grad():
        optimized = fxopt.optimize(model, (ids,), fxopt.Config(bad_ids=mode))
        assert torch.equal(optimized(ids), model(ids))
        ids[2, 1] = 20
        with pytest.raises(IndexError, match="id 20 at row 2"):  # the CPU always raises
            optimized(ids)
    (entry,) = dispatcher_of(optimized).entries
    module = entry.executable.graph
    (call,) = module.graph.find_nodes(op="call_function", target=torch.ops.fxopt.columns.default)
    assert plan_of(getattr(module, call.args[2].target)).bad_ids == mode


def test_encoding_and_gradients_keep_it():
    plan = Plan((Column(Source(0), 0, 0, 0),), (8,), ("float32",), bad_ids="clamp")
    assert decode(encode(plan)).bad_ids == "clamp"
    part = _make_split(plan, (False,), (True,), ("cpu",), (False,), (True,)).dense
    assert part is not None and plan_of(part.plan).bad_ids == "clamp"


def test_other_words_are_refused():
    with pytest.raises(ValueError, match=r"Config\.bad_ids: expected one of"):
        fxopt.Config(bad_ids="ignore")
