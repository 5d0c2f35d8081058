"""One spelling for each operation, shared by models and patterns: what carries no computation goes first."""

from __future__ import annotations

import time

from torch.fx import GraphModule

from fxopt.findings import Change, PassFindings
from fxopt.normalize.dead import remove_dead_code
from fxopt.normalize.functional import make_functional
from fxopt.normalize.gradients import records_nothing, switches_gradients
from fxopt.normalize.literals import fold_literals
from fxopt.normalize.placed import place_constants
from fxopt.normalize.same import remove_identities
from fxopt.normalize.twins import merge_twins
from fxopt.shape.aliases import find_views, mutates

__all__ = ["normalize", "records_nothing", "remove_dead_code", "switches_gradients"]


def normalize(module: GraphModule, inference: bool = False) -> PassFindings:
    """Rewrite `module`'s graph in place: same values, same order of effects, fewer spellings. Twice is as good as once.

    Args:
        module: a captured graph, meta["val"] on its nodes.
        inference: forward runs with gradients off.

    Returns:
        What went, as the findings of a pass named "normalize".
    """
    started = time.perf_counter()
    remove_dead_code(module)
    find_views(module.graph)
    changes = place_constants(module)
    changes += _round(module, inference)
    while any(map(mutates, module.graph.nodes)) and (more := _round(module, inference)):
        changes += more
    return PassFindings("normalize", changes, seconds=time.perf_counter() - started)


def _round(module: GraphModule, inference: bool) -> list[Change]:
    """One round frees edits for the next: what shared their memory may be gone."""
    changes = make_functional(module, inference)
    fold_literals(module)
    changes += remove_identities(module, inference)
    changes += merge_twins(module, inference)
    remove_dead_code(module)
    return changes
