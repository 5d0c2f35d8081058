"""Questions whose answer depends on sizes: where a reshape is a view or a copy."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from fxopt.capture.errors import CaptureError
from fxopt.shape.aliases import is_view
from fxopt.shape.strides import MAY_COPY, Layout, Strides, looks_contiguous

aten = torch.ops.aten
# Fakes of these lie otherwise, too.
_BY_SIZES = {
    aten.einsum.default, aten.one_hot.default, aten.max_pool1d.default, aten.avg_pool1d.default,
    aten.max_pool2d.default, aten.avg_pool2d.default,
}  # fmt: skip


def refuse_guess(node: Node, exactly: bool) -> None:
    """A square matrix keeps its strides in x.T.reshape(x.shape), and others are copied: no trace tells for all sizes.
    Nor does it tell how a product lies whose summed dim may be of size 1, or which strides torch gives a dim of size 1.

    Args:
        exactly: the strides themselves are asked for, not only whether they are contiguous.

    Raises:
        CaptureError: the strides of `node` depend on sizes in such a way.
    """
    strides, left, seen = Strides(node.graph), [node], set[Node]()
    while left:
        node = left.pop()
        viewed = is_view(node) or node.target is operator.getitem
        if strides.known(node) is Layout.CONTIGUOUS and not (exactly and viewed):
            continue
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if node.target in MAY_COPY and not looks_contiguous(node.all_input_nodes[0]):
            raise CaptureError("asks for strides behind a reshape() that copies at some sizes and not at others")
        if node.target in _BY_SIZES or (exactly and not viewed):
            raise CaptureError(f"asks for strides behind {node.name}, which lies otherwise at some sizes")
        left += node.all_input_nodes


def requires_by_layout(node: Node) -> bool:
    """Without gradients a view of what requires them requires them as well, and a copy does not.

    Returns:
        Whether `requires_grad` of `node` depends on the strides of the model's inputs.

    Raises:
        CaptureError: it depends on their sizes.
    """
    reshaped: list[Node] = []
    while is_view(node) or node.target is operator.getitem:
        if node.target in MAY_COPY:
            reshaped.append(node)
        node = node.all_input_nodes[0]
    if not reshaped or not node.meta.get("asks", False):
        return False
    if not all(looks_contiguous(made.all_input_nodes[0]) for made in reshaped):
        raise CaptureError("asks for requires_grad behind a reshape() that copies at some sizes and not at others")
    return True
