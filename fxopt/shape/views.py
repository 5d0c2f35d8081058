"""Strided views as data: which dims of a base tensor stand behind each axis of a chain of view operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fxopt.shape.sizes import Size, product, same, static
from fxopt.shape.view_steps import Contiguous, Expand, Permute, Reshape, Select, Slice, Step, Unsqueeze, regrouped


@dataclass(frozen=True)
class Part:
    """One dim of the base tensor, from `start` on. `whole`: it reaches to the end of that dim.

    Sizes do not take part in `==`, which would ask the shape environment for a guard.
    """

    dim: int
    start: int
    size: Size = field(compare=False)
    whole: bool = True


@dataclass(frozen=True)
class Axis:
    """One axis of the view: the product of its parts, outermost first. No parts: a new axis of size 1.

    spread: the size that an axis of size 1 was expanded to.
    """

    parts: tuple[Part, ...] = ()
    spread: Size | None = field(default=None, compare=False)

    @property
    def size(self) -> Size:
        return product(part.size for part in self.parts) if self.spread is None else self.spread


@dataclass(frozen=True)
class View:
    """A view of a base tensor. Every method gives the next view, or None where it is not a plain strided one.

    axes: one per dim of the view.
    fixed: (dim, index) of the base dims that a select, or a squeeze, has taken away.
    """

    axes: tuple[Axis, ...]
    fixed: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, shape: Iterable[Size]) -> View:
        return cls(tuple(Axis((Part(dim, 0, size),)) for dim, size in enumerate(shape)))

    @property
    def is_base(self) -> bool:
        """Whether this is the base tensor itself."""
        whole = tuple(Axis((Part(dim, 0, size=1),)) for dim in range(len(self.axes)))  # sizes do not count
        return self.axes == whole and not self.fixed and not self.is_expanded

    @property
    def is_expanded(self) -> bool:
        return any(axis.spread is not None for axis in self.axes)

    def is_reshape(self, base: Sequence[Size]) -> bool:
        """Whether these are all elements of a base of that shape, in their order."""
        parts = [part for axis in self.axes for part in axis.parts]
        dims = [part.dim for part in parts if static(part.size) != 1]
        return (
            dims == sorted(dims)
            and not self.is_expanded
            and all(part.start == 0 and part.whole for part in parts)
            and all(static(base[dim]) == 1 for dim, _ in self.fixed)
        )

    def whole_dims(self, base: Sequence[Size]) -> tuple[int | None, ...] | None:
        """By axis the dim of a base of that shape that it is, None where it has size 1 or repeats one element.

        None where the view shows only a part of the base, or joins two dims.
        """
        parts = [part for axis in self.axes for part in axis.parts]
        shown = {part.dim for part in parts}
        left_out = any(static(size) != 1 for dim, size in enumerate(base) if dim not in shown)
        wide = [[part.dim for part in axis.parts if static(part.size) != 1] for axis in self.axes]
        mixed = any(len(dims) > (axis.spread is None) for dims, axis in zip(wide, self.axes, strict=True))
        if left_out or mixed or any(part.start or not part.whole for part in parts):
            return None
        return tuple(dims[0] if dims else None for dims in wide)

    def after(self, step: Step | None) -> View | None:
        """What a view operator makes of it; None stands for one that is no plain view."""
        match step:
            case Slice(dim, start, size, to_end):
                return self.slice(dim, start, size, to_end)
            case Select(dim, index):
                return self.select(dim, index)
            case Unsqueeze(dim):
                return self.unsqueeze(dim)
            case Permute(order):
                return self.permute(order)
            case Expand(shape):
                return self.expand(shape)
            case Reshape(shape):
                return self.reshape(shape)
        return self if isinstance(step, Contiguous) else None

    def slice(self, dim: int, start: int, size: Size, to_end: bool) -> View | None:
        axis = self.axes[dim]
        if start == 0 and same(axis.size, size):
            return self
        if len(axis.parts) != 1 or start < 0 or axis.spread is not None:
            return None
        part = axis.parts[0]
        cut = Part(part.dim, part.start + start, size, part.whole and to_end)
        return self._with(dim, Axis((cut,)))

    def select(self, dim: int, index: int) -> View | None:
        axis = self.axes[dim]
        size = static(axis.size)
        if index < 0:
            if size is None:
                return None
            index += size
        if len(axis.parts) > 1:
            return None
        at = index if axis.spread is None else 0
        fixed = tuple((part.dim, part.start + at) for part in axis.parts)
        return View(self.axes[:dim] + self.axes[dim + 1 :], self.fixed + fixed)

    def unsqueeze(self, dim: int) -> View:
        return View((*self.axes[:dim], Axis(), *self.axes[dim:]), self.fixed)

    def permute(self, order: Sequence[int]) -> View:
        return View(tuple(self.axes[dim] for dim in order), self.fixed)

    def expand(self, shape: Sequence[Size]) -> View:
        """Axes of size 1 become those of `shape`, and new ones come first."""
        axes = (*(Axis() for _ in range(len(shape) - len(self.axes))), *self.axes)
        spread = (
            axis if same(axis.size, size) else Axis(axis.parts, size) for axis, size in zip(axes, shape, strict=True)
        )
        return View(tuple(spread), self.fixed)

    def reshape(self, shape: Sequence[Size]) -> View | None:
        """Merge, split back, add or drop axes; None where an axis would be cut anew."""
        if self.is_expanded:
            return None
        parts = [part for axis in self.axes for part in axis.parts]
        ones = [part for part in parts if static(part.size) == 1]
        dims = regrouped([part for part in parts if static(part.size) != 1], shape)
        if dims is None:
            return None
        return View(tuple(map(Axis, dims)), self.fixed + tuple((part.dim, part.start) for part in ones))

    def _with(self, dim: int, axis: Axis) -> View:
        return View((*self.axes[:dim], axis, *self.axes[dim + 1 :]), self.fixed)
