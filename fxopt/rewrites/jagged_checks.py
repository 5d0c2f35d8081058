"""Conditions on sizes that depend on data: those that the offsets of a jagged tensor are checked for anyway."""

from __future__ import annotations

from fxopt.patterns.jagged.checks import find_jagged_checks
from fxopt.rewrites.framework import Editor, Match, Replacement, Rewrite


def replace_check(editor: Editor, match: Match) -> Replacement:
    return Replacement(
        {match.anchor: None}, "size condition removed", "the lengths are checked when they are summed up"
    )


REWRITE = Rewrite(
    "jagged_checks", find_jagged_checks, replace_check, why="behind the columns, whose offsets ask the same"
)
