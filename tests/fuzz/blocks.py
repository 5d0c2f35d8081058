"""Statements of several lines: gradients switched off or on, tensors made first and filled then, errors caught."""

from __future__ import annotations

from tests.fuzz.writer import Value, Writer

_BLOCKS = (
    "with torch.no_grad():\n    {v} = {x} * 2",
    "with torch.no_grad():\n    {v} = {x}.view_as({x})",
    "with torch.no_grad():\n    {v} = {x}[1:]",
    "with torch.no_grad():\n    {v} = {x}.transpose(0, -1).contiguous()",
    "with torch.enable_grad():\n    {v} = {x} * 2",
    "{v} = torch.empty_like({x})\n{v}.copy_({x})",
    "{v} = {x}.new_zeros({x}.shape)\n{v} += {x}",
    "{v} = torch.zeros_like({x})\n{v}[0] = {x}[-1]",
    "{v} = torch.zeros_like({x})\n{v}[..., 0] = {x}[..., -1]",
    "{v} = torch.add({x}, {y}, out=torch.empty(0, dtype={x}.dtype))",
    "{v} = [{x}, {y}][{x}.shape[0] % 2]",
    "{v} = F.dropout({x}, 0.0, True)",
    "{v} = F.dropout({x}, 0.5, False)",
    "{v} = {x}.data",
    "{v} = {x}.as_strided({x}.shape, {x}.stride())",
    "try:\n    {v} = {x} + {y}\nexcept RuntimeError:\n    {v} = {x} * 2",
    "try:\n    {v} = {x} @ {y}\nexcept RuntimeError:\n    {v} = {x}.relu()",
    "try:\n    {v} = {x}.reshape({y}.shape[0], -1)\nexcept RuntimeError:\n    {v} = {x} * 0.5",
    "try:\n    {v} = {x}.view({y}.shape)\nexcept RuntimeError:\n    {v} = {x} + 1",
)


def block(w: Writer) -> Value | None:
    """A variable that a block of statements makes."""
    return w.block(w.pick(_BLOCKS), x=w.float(), y=w.float())
