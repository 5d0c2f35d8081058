"""Dots of pairs on CUDA, and the cat that takes them, in one launch."""

from __future__ import annotations

import functools

import torch

from fxopt.kernels.interactions.cuda.dots import KERNEL, gpu_dots, load
from fxopt.patterns.core import Match
from fxopt.patterns.gpu_dots import find_gpu_dots
from fxopt.rewrites.core import Replacement, Rewrite
from fxopt.rewrites.editor import Editor
from fxopt.shape.sizes import shape_of


def replace_dots(editor: Editor, match: Match) -> Replacement:
    load()
    editor.needs(KERNEL)
    arguments = [match.bound[name] for name in ("z", "before", "i", "j")]
    call = editor.call(torch.ops.fxopt.gpu_dots.default, *arguments, shape_of(match.anchor)[1])
    call.meta["bound"] = gpu_dots
    what = f"dots of {shape_of(match.bound['z'])[1]} vectors in one row with what stands before them"
    return Replacement({match.anchor: call}, what, "a warp a sample, summed in fp32")


REWRITE = Rewrite("gpu_dots", find_gpu_dots, replace_dots, why="after field_index, whose operator it takes")
OF_FLOATS = Rewrite(
    "gpu_dots_of_floats",
    functools.partial(find_gpu_dots, size=4),
    replace_dots,
    measured=True,
    proof=True,
    why="the same on CUDA cores, whose rate a product in TF32 may beat",
)
