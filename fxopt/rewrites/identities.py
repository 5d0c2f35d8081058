"""Operators that give back one of their arguments: gone."""

from __future__ import annotations

from fxopt.patterns.identities import find_identities
from fxopt.rewrites.framework import Editor, Match, Replacement, Rewrite
from fxopt.shape.calls import name_of


def replace_identity(editor: Editor, match: Match) -> Replacement:
    return Replacement({match.anchor: match.bound["source"]}, f"{name_of(match.anchor)} -> nothing", match.bound["why"])


REWRITE = Rewrite("identities", find_identities, replace_identity, why="after the views: a reshape hides what is added")
