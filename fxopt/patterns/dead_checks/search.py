"""Redundant checks: clamps, substitutions, filters, asserts and the like that value ranges prove to change nothing.

As RECom removes them (Pan et al., ASPLOS 2023), but each with its proof, and never where a value might be substituted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from fxopt.patterns.core import Match, Reject, Search
from fxopt.patterns.dead_checks import arithmetic, asserts, filters, masks
from fxopt.patterns.dead_checks.bags import find_repair
from fxopt.patterns.dead_checks.proofs import Checks, Dead, Handler, Verdict
from fxopt.patterns.dead_checks.unique import find_deduplicated

aten = torch.ops.aten
_TABLES = (arithmetic.HANDLERS, asserts.HANDLERS, filters.HANDLERS, masks.HANDLERS)
_HANDLERS: dict[object, tuple[Handler, ...]] = {}
for _table in (*_TABLES, masks.BITWISE, dict.fromkeys(masks.REPAIRS, find_repair)):
    for _target, _handler in _table.items():
        _HANDLERS[_target] = (*_HANDLERS.get(_target, ()), _handler)
_GATHERS = (aten.index.Tensor, aten.index_select.default, aten.embedding.default)


def find_dead_checks(search: Search) -> Iterator[Match | Reject]:
    """Every dead check, and why the others stay."""
    checks = Checks(search.graph, search.inference)
    for node in search.graph.nodes:
        if node.target in _GATHERS and (unique := find_deduplicated(checks, node)) is not None:
            yield Match(node, unique)
            continue
        verdict = _verdict(checks, node)
        if isinstance(verdict, Dead):
            yield Match(node, {"dead": verdict})
        elif verdict is not None:
            yield verdict


def _verdict(checks: Checks, node: Node) -> Verdict:
    verdicts = [handler(checks, node) for handler in _HANDLERS.get(node.target, ())]
    dead = next((verdict for verdict in verdicts if isinstance(verdict, Dead)), None)
    return dead or next((verdict for verdict in verdicts if verdict is not None), None)
