"""Which of two computations is faster here, at which batch sizes."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fxopt.shape.lookups import CheckedLookups
from fxopt.shape.rows import batch_symbol
from fxopt.tune.clock import all_captured, fastest, on_device_of, once
from fxopt.tune.memory import Memory, Ratios
from fxopt.tune.neighbours import Neighbours
from fxopt.tune.samples import NoSample, batches_of, sample, sizes_of

Function = Callable[..., Any]


@dataclass(frozen=True)
class Effort:
    """rows: the batch sizes to time at; seconds: for all sites of one capture; patience: for one size of one site."""

    rows: tuple[int, ...]
    seconds: float
    patience: float


EFFORTS = {
    "off": Effort((), 0.0, 0.0),
    "fast": Effort((1, 16, 256, 4096), 5.0, 0.015),
    "full": Effort((1, 4, 16, 64, 256, 1024, 4096), math.inf, 0.2),
}
_LONGEST = 0.25  # seconds; a size is not timed where one run is expected to take longer
_RUNS = 6  # of one size at least: each side warms up twice
_FEW = 64  # rows that tell how long many take
_RAN = 0.8  # of a trial this thread had a core; below it the machine was busy, and the next process times again
_LEAST = (0, 1)  # of integers that are made up: ids are ids, but a length of 0 has no last position
_LOSS = 0.96  # ratios below it are losses; between it and 1 is noise


@dataclass(frozen=True)
class Site:
    """Two functions of the same inputs. `values`: the fake values of the inputs; `key`: what the timing depends on,
    None where it cannot be said in words, and so not be remembered; `rows`: sizes to time at, () for the usual ones;
    `state`: inputs that are at hand, by number; `replayed`: timed as captured CUDA graphs."""

    before: Function
    after: Function
    values: Sequence[Any]
    key: str | None
    training: bool
    rows: tuple[int, ...] = ()
    state: Mapping[int, torch.Tensor] = field(default_factory=dict)
    replayed: bool = False


@dataclass(frozen=True)
class Verdict:
    """Seconds before / seconds after, by batch size; empty where nothing was timed, and `reason` says why."""

    ratios: Ratios
    reason: str = ""

    @property
    def slower(self) -> bool:
        """Nowhere faster, and slower somewhere."""
        return any(ratio < _LOSS for ratio in self.ratios.values()) and max(self.ratios.values()) < 1 / _LOSS

    @property
    def faster(self) -> bool:
        """Somewhere, by more than noise."""
        return any(ratio > 1 / _LOSS for ratio in self.ratios.values())

    @property
    def mixed(self) -> bool:
        return not self.slower and any(ratio < _LOSS for ratio in self.ratios.values())

    @property
    def gains(self) -> bool:
        """Over all sizes together."""
        return math.prod(self.ratios.values()) > 1

    def split(self) -> tuple[int, bool]:
        """(most, few): `few` tells which one serves up to `most` rows (True: the new one); the other serves more.

        The cut that wins most time, as a sum of logarithms. Between two timed sizes it stands where a line through
        their logarithms is 0: with 2.13x at 256 and 0.95x at 4096 rows at 3435.
        """
        rows = sorted(self.ratios)
        gains = [math.log(self.ratios[size]) for size in rows]
        cuts = [(sum(gains[:cut]) - sum(gains[cut:]), cut) for cut in range(1, len(rows))]
        few, cut = max(cuts)
        many, other = min(cuts)
        if few < -many:
            cut = other
        below, above = abs(gains[cut - 1]), abs(gains[cut])
        share = below / (below + above) if below + above else 0.5
        return round(rows[cut - 1] * (rows[cut] / rows[cut - 1]) ** share), few >= -many

    def __str__(self) -> str:
        if not self.ratios:
            return f"not timed: {self.reason}"
        return ", ".join(f"{ratio:.2f}x at {rows}" for rows, ratio in sorted(self.ratios.items())) + " rows"


class Tuner:
    """Times sites within a budget of seconds; what was timed before, here or by another process, is remembered."""

    def __init__(self, level: str, memory: Memory | None = None) -> None:
        self.effort = EFFORTS[level]
        self.left = self.effort.seconds
        self._until, self._is_cut = math.inf, False
        self._memory = memory

    @property
    def memory(self) -> Memory:
        """Read when the first site is timed: its name digests every source of the package."""
        if self._memory is None:
            self._memory = _memory()
        return self._memory

    def save(self) -> None:
        """Keep what was timed."""
        if self._memory is not None:
            self._memory.save()

    def verdict(self, site: Site) -> Verdict:
        rows = site.rows or self.effort.rows
        key = site.key and f"{site.key}-{torch.get_num_threads()}-{'/'.join(map(str, rows))}"
        if key and (known := self.memory.get(key)):
            return Verdict(known)
        if self.left <= 0:
            return Verdict({}, "the time for measuring was over (Config(tune='full') takes as long as it needs)")
        started, worked, neighbours = time.perf_counter(), time.thread_time(), Neighbours()
        self._until, self._is_cut = started + self.left, False
        try:
            ratios = self._timed(site, rows)
        except NoSample as error:
            return Verdict({}, str(error))
        finally:
            spent = time.perf_counter() - started
            self.left -= spent
        waits = torch.cuda.is_initialized()  # the processor may, for a GPU
        calm = waits or (time.thread_time() - worked >= _RAN * spent and not neighbours.crowding())
        if key and calm and not self._is_cut:
            self.memory.put(key, ratios)
        return Verdict(ratios)

    def seconds(self, runs: Sequence[Callable[[], object]]) -> tuple[float, float]:
        """Seconds a run of the old one and of the new one; a loss is believed when it is seen twice."""
        before, after = fastest(runs, self.effort.patience)
        if before < _LOSS * after:
            again = fastest(runs, 3 * self.effort.patience)
            before, after = min(before, again[0]), min(after, again[1])
        return before, after

    def _timed(self, site: Site, sizes_to_time: Sequence[int]) -> Ratios:
        site = replace(site, before=_asked(site.before))
        batch = batch_symbol(site.values)
        captured = [] if site.rows or batch is None else [[sizes_of(site.values)[batch]]]
        refused: Unfit | None = None
        for sizes, least in itertools.product((sizes_to_time, *captured), _LEAST):
            try:
                return self._timed_at(site, sizes, _runs_at(site, least))
            except Unfit as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _timed_at(self, site: Site, sizes_to_time: Sequence[int], runs_at: RunsAt) -> Ratios:
        ratios: Ratios = {}
        if site.rows:
            self._foresee(site.rows[0], runs_at)
        for rows, following in itertools.zip_longest(sizes_to_time, sizes_to_time[1:], fillvalue=0):
            try:
                inputs, runs = runs_at(rows)
            except NoSample:
                if ratios:
                    break  # what fewer rows say is enough, where more would not fit
                raise
            if site.rows and not _agree(site.before(*inputs), site.after(*inputs)):
                raise Disagreement(f"its answers differ at {rows} rows")
            with on_device_of(inputs):
                before, after = self.seconds(all_captured(runs) if site.replayed else runs)
            ratios[rows] = before / after
            if not following or batch_symbol(site.values) is None:
                break
            expected = _expected(max(before, after), rows, following, runs_at)
            self._is_cut = self._outlasts(expected)
            if self._is_cut or expected > _LONGEST:
                break
        return ratios

    def _foresee(self, rows: int, runs_at: RunsAt) -> None:
        """Raises NoSample where even the first of the sizes, which is no small one, would outlast the time there is."""
        inputs, (before, _) = runs_at(_FEW)
        with on_device_of(inputs):
            expected = min(once(before), once(before)) * rows / _FEW
        if self._outlasts(expected):
            raise NoSample(f"a run of {rows} rows takes about {expected:.1f} s")

    def _outlasts(self, seconds_a_run: float) -> bool:
        return time.perf_counter() + _RUNS * seconds_a_run > self._until


RunsAt = Callable[[int], tuple[list[Any], list[Callable[[], object]]]]


def _runs_at(site: Site, least: int) -> RunsAt:
    """What makes inputs of so many rows, their integers from `least` on, and the calls of both functions with them."""
    sizes = sizes_of(site.values)
    batches = batches_of(site.values, sizes)
    values = [site.state.get(number, value) for number, value in enumerate(site.values)]
    frozen = {number for number, tensor in site.state.items() if not tensor.requires_grad}

    def runs_at(rows: int) -> tuple[list[Any], list[Callable[[], object]]]:
        inputs = sample(values, sizes | dict.fromkeys(batches, rows), least)
        if any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs):
            with on_device_of(inputs), torch.no_grad(), CheckedLookups():
                site.before(*inputs)
        return inputs, [
            functools.partial(_run, each, inputs, site.training, frozen) for each in (site.before, site.after)
        ]

    return runs_at


class Unfit(Exception):
    """The captured operators refuse what was made up to time them, such as a length of 0, or B = 1 in B * L // B."""


def _asked(before: Function) -> Function:
    """Raises Unfit where it raises."""

    def run(*inputs: Any) -> Any:
        try:
            return before(*inputs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError) as error:
            raise Unfit(f"its own operators refuse what is made up to time them: {error}") from error

    return run


def _expected(seconds: float, rows: int, following: int, runs_at: RunsAt) -> float:
    """Seconds of a call with `following` rows, as `rows` take `seconds`. Attention over the batch grows with the square
    of it, which overhead hides at few rows: where the square would be long, half way there shows how it grows.
    """
    growth = following / rows
    if seconds * growth > _LONGEST or seconds * growth**2 <= _LONGEST:
        return seconds * growth
    inputs, runs = runs_at(math.isqrt(rows * following))
    with on_device_of(inputs):
        middle = max(min(once(run), once(run)) for run in runs)
    return middle * middle / seconds


# Elements compared at a time, which the cache holds with what is computed of them: 50 million as a whole took a trial
# 10 s, in pieces less than 1, and verification 4.7 s and 0.7.
_PIECE = 1 << 18


def in_pieces(left: torch.Tensor, right: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two tensors of one shape, some elements of each at a time."""
    return list(zip(left.reshape(-1).split(_PIECE), right.reshape(-1).split(_PIECE), strict=True))


class Disagreement(Exception):
    """Two functions that ought to compute the same do not, at sizes that verification on the example does not reach."""


@torch.no_grad()
def _agree(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> bool:
    for left, right in zip(expected, found, strict=True):
        if left.dtype == torch.bool:
            if not torch.equal(left, right):
                return False
            continue
        pieces = in_pieces(left, right)
        scale = max(float(piece.abs().nan_to_num(posinf=0.0).max()) if len(piece) else 0.0 for piece, _ in pieces)
        near = functools.partial(torch.allclose, rtol=1e-3, atol=1e-4 * max(scale, 1.0), equal_nan=True)
        if not all(near(*pair) for pair in pieces):
            return False
    return True


def _run(function: Function, inputs: list[Any], training: bool, frozen: Collection[int]) -> None:
    """One call, in training with its backward; `frozen` inputs (a batch norm's statistics) take no gradients."""
    if not training:
        with torch.no_grad():
            function(*inputs)
        return
    leaves = [value if number in frozen else _leaf(value) for number, value in enumerate(inputs)]
    outputs = [value for value in function(*leaves) if value.requires_grad]
    needed = [value for value in leaves if isinstance(value, torch.Tensor) and value.requires_grad]
    if outputs:
        torch.autograd.grad(outputs, needed, [torch.ones_like(value) for value in outputs], allow_unused=True)


def _leaf(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if floating else value


@functools.cache
def _memory() -> Memory:
    return Memory()
