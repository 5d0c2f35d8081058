"""What a model reads of the KeyedJaggedTensors that it is given.

TorchRec's collections look features up by name, and read the lengths of bags and not the offsets that say the same. The
model's Python is traced on stand-ins, to see whether anything else reads the features.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from fxopt import trees
from fxopt.runtime.sharded.division import Division, divided
from fxopt.runtime.sharded.trace import NotTraced, traced
from fxopt.torch_internals.hooks import has_hooks

_POOLED = "torchrec.modules.embedding_modules", "EmbeddingBagCollection"
_COLLECTIONS = (
    _POOLED,
    ("torchrec.modules.embedding_modules", "EmbeddingCollection"),
    ("torchrec.quant.embedding_modules", "EmbeddingBagCollection"),
    ("torchrec.quant.embedding_modules", "EmbeddingCollection"),
)
_KEEPS_AN_ORDER = "__cache_features_order"  # a quantized collection that believes in the order of its first call


@dataclass(frozen=True)
class Read:
    """The names by which features are looked up; pooled: by collections alone that pool bags in any batch sizes."""

    names: frozenset[str] = frozenset()
    pooled: bool = True

    def __or__(self, other: Read) -> Read:
        return Read(self.names | other.names, self.pooled and other.pooled)


def reads_of(model: nn.Module, args: tuple, kwargs: dict) -> list[Read] | None:
    """What is read of each KeyedJaggedTensor of a call; None where more is read of one than features by their names."""
    features = trees.features_in((args, kwargs))
    collections = {module: "looks features up by name" for module in model.modules() if _is_collection(module)}
    if not collections:
        return None
    division = divided(model, collections)
    if "" in division.boundaries:
        return [_read_by(model)] * len(features)
    try:
        hosts = traced(division, args, kwargs)
    except NotTraced:
        return None
    reads = {id(value): Read() for value in features}
    for node, value in hosts.values.items():
        if trees.is_features(type(value)):
            for user in node.users:
                read = _read_in(user, node, division)
                if read is None:
                    return None
                reads[id(value)] |= read
        elif trees.features_in(value) and any(user.target is not getattr for user in node.users):
            return None
    return [reads[id(value)] for value in features]


def _read_in(call: fx.Node, features: fx.Node, division: Division) -> Read | None:
    """What one call reads of features; None where that cannot be said."""
    if call.op == "call_module" and call.target in division.boundaries and call.all_input_nodes == [features]:
        return _read_by(division.boundaries[str(call.target)][0])
    if call.op == "call_function" and call.target is operator.getitem and isinstance(call.args[1], str):
        return Read(frozenset((call.args[1],)), pooled=False)
    return None


def _class_of(module: nn.Module) -> tuple[str, str]:
    return type(module).__module__, type(module).__qualname__


def _is_collection(module: nn.Module) -> bool:
    """Of exactly the classes whose forwards look features up by name, and do nothing else with them."""
    known = _class_of(module) in _COLLECTIONS
    return known and not has_hooks(module) and not getattr(module, _KEEPS_AN_ORDER, False)


def _read_by(collection: Any) -> Read:
    bags = collection.embedding_bag_configs if hasattr(collection, "embedding_bag_configs") else None
    tables = (bags or collection.embedding_configs)()
    return Read(frozenset(name for table in tables for name in table.feature_names), _class_of(collection) == _POOLED)
