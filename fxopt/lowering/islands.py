"""Islands: connected operators that a compiler can fuse into loops of its own, each cut out as one call.

What is left of a graph after the rewrites is of two kinds: products and our operators, which a compiler can only call
(with more Python around each than `direct` leaves: 85 us more for torchrec's DLRM at batch 1), and between them
pointwise chains, reductions and movement. Only the second kind is handed over.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner, Partition
from torch.fx.passes.operator_support import OperatorSupportBase

from fxopt.shape.aliases import is_pure, mutates
from fxopt.shape.calls import is_pointwise
from fxopt.torch_internals.symbols import free_unbacked_symbols

aten = torch.ops.aten
_FEWEST = 2  # operators that compute: one alone is one kernel already
_MOVEMENT_NAMES = """view reshape flatten unflatten unsqueeze squeeze select slice narrow expand expand_as permute
    transpose t movedim split split_with_sizes chunk unbind contiguous clone detach alias lift_fresh_copy"""
_LOOP_NAMES = """softmax log_softmax layer_norm batch_norm prelu sum mean amax amin var std logsumexp prod norm
    linalg_vector_norm where masked_fill cat stack concat repeat to index_select gather embedding
    zeros_like ones_like full_like leaky_relu elu selu celu softplus mish hardtanh relu6 one_hot"""
_MOVEMENT = frozenset(getattr(aten, name) for name in _MOVEMENT_NAMES.split())
_LOOPS = frozenset(getattr(aten, name) for name in _LOOP_NAMES.split())


def islands(module: GraphModule) -> Iterator[Partition]:
    """Groups of nodes that may become one call each without a cycle, largest first."""
    finder = CapabilityBasedPartitioner(module, _Fusible(), non_compute_ops=list(map(str, _MOVEMENT)))
    found = [part for part in finder.propose_partitions() if sum(map(computes, part.nodes)) >= _FEWEST]
    yield from sorted(found, key=lambda part: -sum(map(computes, part.nodes)))


def left_to_loops(module: GraphModule) -> tuple[int, int]:
    """How many operators of a graph compiled loops could compute, and in how many calls."""
    if obstacle(module) is not None:
        return 0, 0
    found = list(islands(module))
    return sum(computes(node) for part in found for node in part.nodes), len(found)


def obstacle(module: GraphModule) -> Node | None:
    """A node that writes to memory: around it calls may not change places."""
    return next((node for node in module.graph.nodes if node.op.startswith("call") and mutates(node)), None)


def computes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.overloadpacket not in _MOVEMENT


class _Fusible(OperatorSupportBase):
    def is_node_supported(self, submodules: Mapping[str, Any], node: Node) -> bool:
        """An operator without effects that becomes a loop, on sizes that do not depend on data."""
        if not (isinstance(node.target, OpOverload) and _becomes_a_loop(node.target) and is_pure(node)):
            return False
        values = [node.meta.get("val"), *(needed.meta.get("val") for needed in node.all_input_nodes)]
        return not any(free_unbacked_symbols(value) for value in values if value is not None)


@functools.cache
def _becomes_a_loop(target: OpOverload) -> bool:
    if target.namespace != "aten":
        return False
    return is_pointwise(target) or target.overloadpacket in _LOOPS | _MOVEMENT
