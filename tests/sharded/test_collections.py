"""TorchRec's collections keep their type: the planner and the sharders find them, optimized or not."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.runtime import dispatcher_of

torchrec = pytest.importorskip("torchrec")
CONFIG = fxopt.Config(tune="off")


def collection() -> Any:
    tables = [
        torchrec.EmbeddingBagConfig(name=f"t{i}", embedding_dim=8, num_embeddings=10, feature_names=[f"f{i}"])
        for i in range(2)
    ]
    return torchrec.EmbeddingBagCollection(tables=tables)


def ids(size: int = 3) -> Any:
    lengths = torch.randint(0, 3, (2 * size,))
    return torchrec.KeyedJaggedTensor(["f0", "f1"], torch.randint(0, 10, (int(lengths.sum()),)), lengths=lengths)


class Model(nn.Module):
    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags, self.over = bags, nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, features: Any) -> Any:
        return self.over(self.bags(features).values())


def test_the_type_and_the_answers_stay() -> None:
    eager = collection()
    fast = fxopt.optimize(eager, config=CONFIG)
    assert type(fast) is type(eager)
    assert fast.state_dict().keys() == eager.state_dict().keys()
    assert next(fast.parameters()) is next(eager.parameters())
    for size in (3, 1, 5):
        features = ids(size)
        torch.testing.assert_close(fast(features).values(), eager(features).values())
    assert dispatcher_of(fast).findings
    assert "fxopt report" in str(fxopt.report(fast))
    assert fxopt.optimize(fast, config=CONFIG) is not fast
    assert not dispatcher_of(fxopt.optimize(fast, config=CONFIG)).findings


def test_copies_are_drop_ins_of_their_own() -> None:
    fast = fxopt.optimize(collection(), config=CONFIG)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert type(other) is type(fast)
        assert dispatcher_of(other).original is other
        with torch.no_grad():
            next(other.parameters()).add_(1)
        features = ids()
        torch.testing.assert_close(other(features).values(), type(other).forward(other, features).values())
        assert dispatcher_of(other).findings and not dispatcher_of(fast).findings


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("inside", [False, True])
def test_the_planner_shards_it(inside: bool) -> None:
    from torchrec.distributed import DistributedModelParallel

    torch.manual_seed(0)
    model: nn.Module = Model(fxopt.optimize(collection(), config=CONFIG) if inside else collection())
    model = fxopt.optimize(model, config=CONFIG)
    sharded = DistributedModelParallel(model, device=torch.device("cpu"))
    assert set(sharded.plan.plan) == {"bags"}
    assert type(sharded.module.bags).__name__ == "ShardedEmbeddingBagCollection"
    eager = dispatcher_of(sharded.module).original
    with torch.no_grad():
        for size in (3, 2, 5):
            features = ids(size)
            torch.testing.assert_close(sharded(features), eager(features))
    assert any(found.operators_before for found in dispatcher_of(sharded.module).findings)


def test_a_fused_collection_is_captured_around_once() -> None:
    """It is opaque, because it steps its optimizer; its batch size is no size of its arguments."""
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    def fused() -> nn.Module:
        torch.manual_seed(0)
        tables = collection().embedding_bag_configs()
        return Model(FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": 0.1}, device=torch.device("cpu")))

    eager, fast = fused(), fxopt.optimize(fused(), config=CONFIG)
    fast.load_state_dict(eager.state_dict())
    for size in (11, 1, 7, 64):
        features = ids(size)
        expected, found = eager(features), fast(features)
        torch.testing.assert_close(found, expected)
        expected.sum().backward(), found.sum().backward()
    assert [found.eager_reason for found in dispatcher_of(fast).findings] == [""]
