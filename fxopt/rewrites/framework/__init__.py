"""What runs the rules: transactions and trials of rewrites, and the last spelling of a finished graph.

A rule is written with the names that stand here.
"""

from fxopt.patterns.core import Match
from fxopt.rewrites.framework.core import Replacement, Rewrite
from fxopt.rewrites.framework.editor import Editor, Rejected
from fxopt.rewrites.framework.policy import MEASURED, PROVEN, Policy

__all__ = ["MEASURED", "PROVEN", "Editor", "Match", "Policy", "Rejected", "Replacement", "Rewrite"]
