"""Mixtures of experts on CUDA in one launch, `fxopt::gpu_mixtures`: the experts are read where they lie."""

from __future__ import annotations

import operator

from torch.fx import Node

from fxopt.kernels.mixtures.cuda.mixtures import OPERATORS, gpu_mixtures
from fxopt.patterns.contractions.terms import Factor
from fxopt.patterns.mixtures import Mixture, find_mixtures
from fxopt.rewrites.contractions import arranged, like
from fxopt.rewrites.framework import PROVEN, Editor, Match, Replacement, Rewrite


def replace_mixtures(editor: Editor, match: Match) -> Replacement:
    mixtures: list[Mixture] = match.bound["mixtures"]
    editor.hoist_for([node for mixture in mixtures for node in mixture.reads])
    experts = {expert.node: expert for mixture in mixtures for expert in mixture.experts}
    places = {node: number for number, node in enumerate(experts)}
    numbers = [places[expert.node] for mixture in mixtures for expert in mixture.experts]
    logits = [_matrix(editor, mixture.logits) for mixture in mixtures]
    arguments = logits, [_matrix(editor, expert) for expert in experts.values()], numbers
    call = editor.ours(OPERATORS, "gpu_mixtures", gpu_mixtures, *arguments)
    values = {mixture.anchor: _taken(editor, mixture, call, at) for at, mixture in enumerate(mixtures)}
    many = "1 mixture" if len(mixtures) == 1 else f"{len(mixtures)} mixtures"
    what = f"{many} of {len(experts)} experts in one launch"
    return Replacement(values, what, "the experts are read where they lie, and weighed as they are")


def _matrix(editor: Editor, factor: Factor) -> Node:
    return arranged(editor, factor, [(axis,) for axis in factor.axes])


def _taken(editor: Editor, mixture: Mixture, call: Node, at: int) -> Node:
    result = Factor(editor.call(operator.getitem, call, at), tuple((axis,) for axis in mixture.term.axes))
    value = arranged(editor, result, mixture.dims)
    return like(editor, mixture.anchor, value, mixture.term.inside)


REWRITE = Rewrite(
    "gpu_mixtures",
    find_mixtures,
    replace_mixtures,
    policy=PROVEN,
    why="behind the interactions, products of another kind; before what takes a softmax or a product by elements",
)
