"""Dead checks removed: what stood behind a check takes its place."""

from __future__ import annotations

import torch
from torch.fx import Node

from fxopt.patterns.dead_checks.proofs import Dead
from fxopt.patterns.dead_checks.search import find_dead_checks
from fxopt.rewrites.framework import Editor, Match, Replacement, Rewrite
from fxopt.shape.calls import arguments_of

aten = torch.ops.aten


def replace_check(editor: Editor, match: Match) -> Replacement:
    anchor = match.anchor
    if "lookup" in match.bound:
        return _all_rows(editor, match)
    dead: Dead = match.bound["dead"]
    return Replacement({anchor: _kept(editor, anchor, dead)}, dead.what, dead.why, dead.equal)


def _kept(editor: Editor, anchor: Node, dead: Dead) -> Node | None:
    if not dead.keeps:
        return None
    kept = arguments_of(anchor)[dead.keeps]  # read now: earlier removals may have moved it
    assert isinstance(kept, Node)
    if dead.merged:
        kept = editor.call(aten.flatten.using_ints, kept, *dead.merged)
    return kept if dead.copied is None else editor.call(aten.clone.default, kept, memory_format=dead.copied)


def _all_rows(editor: Editor, match: Match) -> Replacement:
    lookup: Node = match.bound["lookup"]
    given = list(lookup.args)
    given[2 if lookup.target is aten.index_select.default else 1] = match.bound["ids"]
    rows = editor.call(lookup.target, *given, **lookup.kwargs)  # type: ignore[arg-type]
    return Replacement(
        {match.anchor: rows}, "unique around a lookup removed", "the inverse gives every id its own row again"
    )


REWRITE = Rewrite(
    "dead_checks", find_dead_checks, replace_check, why="first: everything after it sees plainer ids and known sizes"
)
