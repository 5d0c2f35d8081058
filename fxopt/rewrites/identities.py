"""Operators that give back one of their arguments: gone."""

from __future__ import annotations

from fxopt.patterns.core import Match
from fxopt.patterns.identities import find_identities
from fxopt.rewrites.framework.core import Replacement, Rewrite
from fxopt.rewrites.framework.editor import Editor
from fxopt.rewrites.views import name_of


def replace_identity(editor: Editor, match: Match) -> Replacement:
    return Replacement({match.anchor: match.bound["source"]}, f"{name_of(match.anchor)} -> nothing", match.bound["why"])


REWRITE = Rewrite("identities", find_identities, replace_identity, why="after the views: a reshape hides what is added")
