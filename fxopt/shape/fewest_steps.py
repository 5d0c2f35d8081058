"""From a view back to operators: the fewest that make it out of its base."""

from __future__ import annotations

from collections.abc import Sequence

from fxopt.shape.sizes import Size, same_sizes, static
from fxopt.shape.view_steps import Expand, Permute, Reshape, Select, Slice, Step
from fxopt.shape.views import Axis, Part, View


def steps_of(view: View, base: Sequence[Size]) -> list[Step] | None:
    """The operators that make `view` out of a tensor of shape `base`; None where these kinds do not suffice."""
    views = [view]
    if any(static(base[dim]) != 1 for dim, _ in view.fixed):
        views.append(_kept_ones(view, base))
    ways = [_steps(each, base, select_ones=False) for each in views]
    if any(_is_cut_to_one(part, base) for axis in view.axes for part in axis.parts):
        ways.append(_steps(view, base, select_ones=True))
    return min((way for way in ways if way is not None), key=len, default=None)


def _kept_ones(view: View, base: Sequence[Size]) -> View:
    """The same view with new axes as slices of size 1 where it has selects: x[:, 3].unsqueeze(1) is x[:, 3:4]."""
    picked = sorted((dim, index) for dim, index in view.fixed if static(base[dim]) != 1)
    axes = []
    for axis in view.axes:
        if not axis.parts and axis.spread is None and picked:
            dim, index = picked.pop(0)
            axis = Axis((Part(dim, index, 1, whole=False),))
        axes.append(axis)
    dims = {part.dim for axis in axes for part in axis.parts}
    return View(tuple(axes), tuple((dim, index) for dim, index in view.fixed if dim not in dims))


def _steps(view: View, base: Sequence[Size], select_ones: bool) -> list[Step] | None:
    """select_ones: a slice of size 1 is a select, and its axis a new one."""
    axes = [_without_ones(axis, base) for axis in view.axes] if select_ones else list(view.axes)
    parts = {part.dim: part for axis in axes for part in axis.parts}
    fixed = dict(view.fixed)
    if select_ones:
        kept = [part for axis in view.axes for part in axis.parts if part.dim not in parts]
        fixed |= {part.dim: part.start for part in kept}
    if len(parts) + len(fixed) != len(base) or parts.keys() & fixed.keys():
        return None
    cuts = _cuts(parts, fixed, base)
    if cuts is None:
        return None
    left = [dim for dim in range(len(base)) if dim in parts or static(base[dim]) == 1]
    sizes = {dim: parts[dim].size if dim in parts else 1 for dim in left}
    return cuts + _arranged(axes, left, sizes)


def _without_ones(axis: Axis, base: Sequence[Size]) -> Axis:
    return Axis(tuple(part for part in axis.parts if not _is_cut_to_one(part, base)), axis.spread)


def _is_cut_to_one(part: Part, base: Sequence[Size]) -> bool:
    return static(part.size) == 1 and static(base[part.dim]) != 1


def _cuts(parts: dict[int, Part], fixed: dict[int, int], base: Sequence[Size]) -> list[Step] | None:
    """Slices and selects, the last dim first, so that the dims before keep their numbers."""
    cuts: list[Step] = []
    for dim in reversed(range(len(base))):
        if dim in fixed:
            if static(base[dim]) != 1:
                cuts.append(Select(dim, fixed[dim]))
            continue
        part = parts[dim]
        if part.whole and part.start == 0:
            continue
        if not part.whole and static(part.size) is None:
            return None
        cuts.append(Slice(dim, part.start, part.size, part.whole))
    return cuts


def _arranged(axes: Sequence[Axis], left: list[int], sizes: dict[int, Size]) -> list[Step]:
    """Permute, reshape and expand: from the dims that are `left` to the axes."""
    steps: list[Step] = []
    wanted = [part.dim for axis in axes for part in axis.parts if static(part.size) != 1]
    if wanted != sorted(wanted):
        order = _order(axes, left)
        steps.append(Permute(tuple(left.index(dim) for dim in order)))
        left = order
    shape = [sizes[dim] for dim in left]
    target = [axis.size for axis in axes]
    if same_sizes(shape, target):
        return steps
    if not any(axis.spread is not None for axis in axes):
        return [*steps, Reshape(tuple(target))]
    narrow = [axis.size if axis.spread is None else 1 for axis in axes]
    leading = len(target) - len(shape)
    if not (
        leading >= 0 and all(axis.spread is not None for axis in axes[:leading]) and same_sizes(shape, narrow[leading:])
    ):
        steps.append(Reshape(tuple(narrow)))
    return [*steps, Expand(tuple(target))]


def _order(axes: Sequence[Axis], left: list[int]) -> list[int]:
    """The dims in the order of the axes; new axes take dims of size 1 that no axis speaks of, while there are some."""
    named = {part.dim for axis in axes for part in axis.parts}
    spare = [dim for dim in left if dim not in named]
    order: list[int] = []
    for axis in axes:
        if axis.parts:
            order += [part.dim for part in axis.parts]
        elif spare:
            order.append(spare.pop(0))
    return order + spare
