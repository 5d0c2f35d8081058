"""Traces with other hints and static dims, until one stands whose guards the example fulfils."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.utils._pytree as pytree
from torch import nn

from fxopt import trees
from fxopt.autocast import autocast_state
from fxopt.capture import leaves as opaque
from fxopt.capture.boundaries import INSTALLED
from fxopt.capture.captured import Capture
from fxopt.capture.edits import attributes_of, check_attributes, check_memory, layout
from fxopt.capture.effects import Attributes, demand_plain, demand_results, filled_arguments, make_write_first, record
from fxopt.capture.entered import entering_none
from fxopt.capture.errors import CaptureError, OtherData, StartAgain, is_passing
from fxopt.capture.fixed import FixedSizes
from fxopt.capture.generators import Generators
from fxopt.capture.guards import guards_of
from fxopt.capture.inputs import Dim, FakeInputs, Inputs, Shapes, filled, trace_shapes
from fxopt.capture.leaves import Leaf, Trial, share_memory
from fxopt.capture.lengths import no_lengths
from fxopt.capture.packed import MakePositive, MakeStatic, PackedDims
from fxopt.capture.padded import keep_padding
from fxopt.capture.places import Places
from fxopt.capture.reach import Reach
from fxopt.capture.state import ModelCopy, fake_state, label
from fxopt.capture.trace import trace
from fxopt.findings import Place
from fxopt.reach.held import OWN
from fxopt.torch_internals.fake_tensors import DATA_DEPENDENT, is_of_a_key, is_of_nested
from fxopt.tracebacks import let_go

_INT = re.compile(r"\bint\(")
_FINAL = (*DATA_DEPENDENT, CaptureError)  # no other sizes would help

PATIENCE = 4  # traces that ask for the dims of one input after the other, before inputs alike are treated alike


class Stopped(Exception):
    """A trace failed at one module."""

    def __init__(self, found: dict[str, Leaf]):
        self.found = found


@dataclass
class Attempts:
    """Traces of one model with one set of leaves.

    Attributes:
        stores: attributes the forward assigns, learned from the first trace (see effects.py).
        copies: the model's, one for each trace.
        varied: dims that are no layout, as they have had other sizes; none where that failed.
        asks_cuts: whether a cut asks how many items there are.
        takes_answers: whether the first call answers questions about data.
        symbolic_len: whether len(tensor) stays symbolic; no longer where that failed (numpy, keys of a dict).
    """

    model: nn.Module
    inputs: Inputs
    leaves: dict[str, Leaf]
    trial: Trial
    reach: Reach
    varied: frozenset[Dim] = frozenset()
    asks_cuts: bool = True
    takes_answers: bool = True
    stores: Attributes = field(default_factory=dict)
    copies: list[ModelCopy] = field(default_factory=list)
    symbolic_len: bool = True
    gave_len: bool = False

    def first(self) -> Capture:
        """The first attempt whose guards hold for the example."""
        reason: Stopped | None = None
        for shapes, static in self._choices():
            try:
                found = self._settle(shapes, static)
            except Stopped as stop:
                let_go(reason)
                reason = stop
                if stop.__cause__ is None or isinstance(stop.__cause__, _FINAL):
                    break
                continue
            if found.guards.holds(self.inputs.tensors):
                let_go(reason)
                return found
        if self.varied or (self.gave_len and self.symbolic_len):
            self.symbolic_len = bool(self.varied)
            self.varied = frozenset()
            let_go(reason)
            return self.first()
        raise reason or CaptureError("no graph found whose size conditions hold for these inputs")

    def end(self) -> None:
        """Leave no copy in a cycle."""
        for copy in self.copies:
            copy.forget()

    def _choices(self) -> Iterator[tuple[Shapes, set[Dim]]]:
        """Sizes to trace with and static dims, most general first."""
        inner = {(i, d) for i, t in enumerate(self.inputs.tensors) for d in range(1, t.ndim)}
        empty = {(i, d) for i, d in inner if self.inputs.tensors[i].shape[d] == 0}
        if empty:
            for shapes in trace_shapes(self.inputs.tensors):
                yield filled(shapes), set()
        single = self._single()
        ones = empty | {(i, d) for i, d in inner if self.inputs.tensors[i].shape[d] == 1}  # to be broadcast, perhaps
        ways = [empty, ones, ones | single, inner, single]
        for static in (way for place, way in enumerate(ways) if way not in ways[:place]):
            for shapes in trace_shapes(self.inputs.tensors):
                yield shapes, static

    def _single(self) -> set[Dim]:
        """Batches of one beside others, such as one user and N items: they may be meant to be broadcast."""
        batches = {(i, 0): t.shape[0] for i, t in enumerate(self.inputs.tensors) if t.ndim}
        single = {dim for dim, size in batches.items() if size == 1}
        return single if len(single) < len(batches) else set()

    def _settle(self, shapes: Shapes, static: set[Dim]) -> Capture:
        """Trace, again for as long as the trace asks for more static or positive dims, or attributes to store."""
        positive: set[Dim] = set()
        traces = 0
        while True:
            traces += 1
            try:
                with entering_none(self.reach.barred):
                    return self._trace(shapes, static, positive)
            except MakeStatic as found:
                static = static | found.dims
                if traces >= PATIENCE:
                    static |= self._alike(found.dims) - self.varied
            except MakePositive as found:
                positive = positive | (found.dims if traces < PATIENCE else self._alike(found.dims))
            except _MakeStores as found:
                self.stores.update(found.stores)

    def _alike(self, dims: set[Dim]) -> set[Dim]:
        """These dims, and those >= 1 of every input of the same dtype and inner sizes: hundreds need no trace each."""
        forms = [(t.dtype, tuple(t.shape[1:])) for t in self.inputs.tensors]
        axes = {(forms[i], d) for i, d in dims}
        return dims | {(i, d) for i, form in enumerate(forms) for d in range(1, len(form[1]) + 1) if (form, d) in axes}

    def _trace(self, shapes: Shapes, static: set[Dim], positive: set[Dim]) -> Capture:
        fakes = FakeInputs(self.inputs, shapes, static, positive)
        fakes.shape_env.symbolic_len, fakes.shape_env.asks_cuts = self.symbolic_len, self.asks_cuts
        form: list[tuple[pytree.TreeSpec, tuple[pytree.KeyPath, ...]]] = []

        def run(tracer: Any) -> list[Any]:
            opaque.install(copy, self.model, self.trial, tracer, fakes.fake_mode)
            keep_padding(copy)
            for path, names in self.stores.items():
                make_write_first(copy.at(path), path, names)
            args, kwargs = self.inputs.unflatten(fakes.tensors)
            given = trees.flatten((args, kwargs))
            result = type(copy.root).forward(copy.root, *args, **kwargs)
            filled = tuple(filled_arguments(given, trees.flatten_with_path((args, kwargs))))
            flat, spec = trees.flatten(trees.with_filled(result, (args, kwargs), filled))
            form.append((spec, filled))
            check_attributes([*news, *fakes.tensors], attributes, flat)
            demand_plain(flat, "returns")
            demand_results(result, tracer)
            for path, names in self.stores.items():
                order = list(vars(copy.at(path)))
                for name in sorted(names, key=lambda name: (name in order and order.index(name), name)):
                    record(copy.at(path), self.model.get_submodule(path), path, name, tracer)
            return flat

        places = Places({})
        try:
            copy = ModelCopy(self.model, fake_state(fakes.fake_mode, self.trial.within_leaf))
            self.copies.append(copy)
            places = Places({key: path for key, path in copy.paths.items() if path not in self.leaves})
            fakes.shape_env.on_number = numbers = FixedSizes(places)
            slots, reals, news = zip(*copy.state, strict=True) if copy.state else ((), (), ())
            generators = Generators(self.model)
            layouts = list(map(layout, (*news, *fakes.tensors)))
            attributes = list(map(attributes_of, (*news, *fakes.tensors)))
            graph, asked, read, taken = trace(
                run,
                [*news, *fakes.tensors],
                [*reals, *self.inputs.tensors],
                len(reals),
                fakes.fake_mode,
                places,
                PackedDims(fakes, shapes, self.inputs.tensors, positive, self.varied),
                self.reach.spaces,
                self.takes_answers,
            )
        except (StartAgain, OtherData):
            raise
        except Exception as error:
            if is_passing(error):
                raise
            self.gave_len |= fakes.shape_env.gave_len
            raise _stopped(error, places) from error
        finally:
            fakes.shape_env.on_number = None
            fakes.shape_env.raised.clear()  # their tracebacks hold the model
            outside = self.reach.changed()
            self.reach.put_back()
        if outside:
            raise Stopped({"": Leaf("", f"forward changes {outside}, which is not the model's own", Place())})
        if drawn := generators.advanced():
            generators.put_back()
            raise Stopped({"": Leaf("", f"draws from {drawn}, which a graph would do only once", Place())})
        self._check_effects(copy)
        try:
            check_memory(graph, (*news, *fakes.tensors), layouts, slots, self.trial.edits)
        except CaptureError as error:
            raise _stopped(error, places) from error
        if lengths := no_lengths(fakes, self.inputs.tensors, self.varied):
            raise MakeStatic(lengths)
        used = label(graph, slots, self.inputs.names)
        share_memory(graph)
        fixed = {dim: int(self.inputs.tensors[dim[0]].shape[dim[1]]) for dim in static}
        answers = tuple(self._answers(asked))
        guards = guards_of(fakes.shape_env, fakes.sources, fixed, positive - static, answers)
        told = numbers.told(dict(guards.static), self.varied, fakes.sources, self.inputs.names)
        return Capture(
            graph,
            used,
            fakes.told(dict(guards.static)),
            self.inputs.constants,
            self.inputs.spec,
            form[0][0],
            guards,
            tuple(leaf for path, leaf in self.leaves.items() if path in self.trial.calls),
            fakes.fake_mode,
            fakes.shape_env,
            self.inputs.firsts,
            autocast_state(),
            form[0][1],
            tuple(read),
            tuple(told),
            tuple(taken),
        )

    def _answers(self, asked: set[str]) -> Iterator[str]:
        """Conditions on the inputs t under which the forward's questions have the answers that they had here."""
        for number, tensor in enumerate(self.inputs.tensors):
            if "strides" in asked:
                yield f"t[{number}].is_contiguous()"
            if "exact strides" in asked:  # of a dim of size 1 and of an empty tensor, too
                sizes = [f"t[{number}].shape[{dim}]" for dim in range(tensor.ndim)]
                strides = [" * ".join(sizes[dim + 1 :]) or "1" for dim in range(tensor.ndim)]
                yield f"t[{number}].stride() == ({''.join(stride + ', ' for stride in strides)})"
            if "requires_grad" in asked:
                yield f"t[{number}].requires_grad is {tensor.requires_grad}"

    def _check_effects(self, copy: ModelCopy) -> None:
        """Attributes assigned while tracing: to be stored by the graph, or else their module becomes a leaf."""
        every = copy.changed_attributes()
        inside = {path: names - INSTALLED for path, names in every.items() if self.trial.within_leaf(path)}
        for path, names in inside.items():
            if names:
                reason = f"forward sets {min(names)!r} of {path}, which stays opaque"
                raise Stopped({"": Leaf("", reason, Place(path))})
        changed = {path: names for path, names in every.items() if path not in inside}
        fixed = {p: names.intersection(OWN) for p, names in changed.items()}
        stop = {p: Leaf(p, f"forward changes its {min(n)}", Place(p)) for p, n in fixed.items() if n}
        if stop:
            raise Stopped(stop)
        if any(names - self.stores.get(path, set()) for path, names in changed.items()):
            raise _MakeStores({path: names | self.stores.get(path, set()) for path, names in changed.items()})


class _MakeStores(Exception):
    """Start the trace again: the forward assigns these attributes."""

    def __init__(self, stores: Attributes):
        super().__init__(str(stores))
        self.stores = stores


def _stopped(error: Exception, places: Places) -> Stopped:
    path, place, source = places.of_error(error)
    if isinstance(error, CaptureError):  # one with a place names the culprit
        path = error.place.module or path
        return Stopped({path: Leaf(path, error.reason, error.place if error.place.module else place)})
    what = str(error).strip().split("\n")[0] or type(error).__name__
    advice = "; .item() in place of int() gives a size that may be any number" if _INT.search(source) else ""
    why = f"depends on data{advice}" if isinstance(error, DATA_DEPENDENT) else what
    why = "a size, or a number that data tells, is the key of a dict or set" if is_of_a_key(error) else why
    why = "makes a nested tensor, which no graph holds" if is_of_nested(error) else why
    return Stopped({path: Leaf(path, f"`{source}`: {why}" if source else why, place)})
