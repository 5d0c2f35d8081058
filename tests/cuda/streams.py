"""Streams that are none: who runs what when, and what is known to be done, by events alone."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxopt.kernels import side_stream


@dataclass(eq=False)
class Stream:
    """known: the calls that are done before whatever is launched next; reused: those that must be, because memory that
    they touched may be given out again."""

    device_index: int = 0
    known: set[int] = field(default_factory=set)
    reused: set[int] = field(default_factory=set)
    launched: int = 0

    def record_event(self) -> set[int]:
        return set(self.known)

    def wait_event(self, event: set[int]) -> None:
        self.known |= event

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


@dataclass
class _Memory:
    stream: Stream
    writes: set[int] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)
    tensors: int = 0


class Hazard(AssertionError):
    """Two calls on memory of which one has to wait for the other and does not."""


class Capture(TorchDispatchMode):
    """Every call is launched on the current stream; memory is free for the stream that it was made on as soon as no
    tensor holds it."""

    def __init__(self, monkeypatch) -> None:
        super().__init__()
        self.main = self.current = Stream()
        self.by_main: dict[Stream, Stream] = {}
        self.calls = 0
        self.memory: dict[int, _Memory] = {}
        monkeypatch.setattr(side_stream, "_SIDES", self.by_main)
        monkeypatch.setattr(side_stream, "new_stream", Stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))

    @property
    def sides(self) -> list[Stream]:
        return list(self.by_main.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(argument.alias_info and not argument.alias_info.is_write for argument in function._schema.arguments):
            result = function(*args, **(kwargs or {}))
            for tensor in _tensors((args, result)):
                self._of(tensor)  # a view: nothing is launched
            return result
        stream, call = self.current, self.calls
        self.calls += 1
        stream.launched += 1
        self._ordered(stream, stream.reused)
        written = self._written(function, args)
        for tensor in _tensors((args, kwargs)):
            memory = self._of(tensor)
            writes = any(tensor is each for each in written)
            self._ordered(stream, memory.writes | (memory.reads if writes else set()))
            (memory.writes if writes else memory.reads).add(call)
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._of(tensor).writes.add(call)
        stream.known.add(call)
        return result

    def _ordered(self, stream: Stream, calls: set[int]) -> None:
        calls = calls - {self.calls - 1}  # its own
        if not calls <= stream.known:
            raise Hazard(f"call {self.calls - 1} does not wait for {sorted(calls - stream.known)}")

    def _written(self, function: Any, args: Any) -> list[torch.Tensor]:
        schema = function._schema.arguments
        return [a for a, s in zip(args, schema, strict=False) if s.alias_info is not None and s.alias_info.is_write]

    def _of(self, tensor: torch.Tensor) -> _Memory:
        key = tensor.untyped_storage()._cdata
        memory = self.memory.setdefault(key, _Memory(self.current))
        if not hasattr(tensor, "_counted"):
            tensor._counted = True
            memory.tensors += 1
            weakref.finalize(tensor, self._dropped, key)
        return memory

    def _dropped(self, key: int) -> None:
        memory = self.memory[key]
        memory.tensors -= 1
        if not memory.tensors:
            memory.stream.reused |= memory.reads | memory.writes
            del self.memory[key]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def run_captured(module, inputs, monkeypatch) -> tuple[Capture, Any]:
    """What a capture of the call sees, and its result."""
    capture = Capture(monkeypatch)
    with capture:
        result = module(*inputs)
    return capture, result
