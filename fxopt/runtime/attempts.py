"""Captures of calls that no entry serves: one attempt, and after how many of them the next calls do without."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from fxopt.findings import Findings
from fxopt.runtime.entry import Entry, entry_of, stored_by
from fxopt.runtime.executable import Compile, Executable
from fxopt.runtime.moment import Moment, NotNow
from fxopt.runtime.reasons import described, reason_of
from fxopt.runtime.signature import Signature, holds_array, unsupported
from fxopt.runtime.watch import Watch
from fxopt.shape.conditions import OtherSizes
from fxopt.torch_internals.autograd import saving_as_usual
from fxopt.torch_internals.hooks import HOOKS
from fxopt.torch_internals.seeds import draws_put_back
from fxopt.tracebacks import let_go

if TYPE_CHECKING:
    from fxopt.capture import Capture

_PATIENCE = 3  # captures in a row that fail for a passing reason, before one that fails is taken at its word
_REJECTED = 2  # calls in a row, before the model is asked ahead of a capture, which takes 30 to 330 ms
_UNLOOKED = 63  # misses; to look through 16 captures takes 300 us, a call of a small model 40
_LOOKS = 3  # graphs of a model whose leaves return other sizes than in their trial run, before such calls stay eager
_FILLS = 2  # times that a model is captured anew because a call has filled a cache; some are emptied again and again


class Attempts:
    """Captures of one model, and what those and the calls between them have told about the next one."""

    def __init__(self, original: nn.Module, compile: Compile) -> None:
        self._original, self._compile = original, compile
        self._patience, self._looks, self._fills = _PATIENCE, _LOOKS, _FILLS
        self._answered = False  # whether a graph went, since many calls answered otherwise than the first
        self._refuted: list[Capture] = []
        self._rejected = 0  # calls in a row that no capture served and that the model refuses
        self._arrays_refused = False  # by the last miss, so that the next one need not find the reason
        self._unlooked = 0  # misses to come that run eagerly, where there is no room for another capture
        self._skips = self._skipped = 0  # misses that stay eager, since the data of one stopped the graph made from it

    def passes_by(self, args: tuple, kwargs: dict, full: bool) -> bool:
        """Whether a miss runs eagerly without a look at it. full: there is no room for another capture."""
        if full and self._unlooked:
            self._unlooked -= 1
            return True
        return self._arrays_refused and holds_array((args, kwargs))

    def asks_first(self) -> bool:
        return self._rejected >= _REJECTED

    def ask(self, eager: Callable, args: tuple, kwargs: dict) -> Any:
        """The call itself, which the model may refuse."""
        self._rejected += 1
        result = eager(*args, **kwargs)
        self._rejected = 0
        return result

    def refusal(self, args: tuple, kwargs: dict) -> str:
        """Why inputs like these are never captured."""
        self._arrays_refused = holds_array((args, kwargs))
        return unsupported(args, kwargs)

    def skips(self) -> bool:
        """Whether this miss waits, as the data of an earlier one stopped its capture."""
        self._skipped += (waits := self._skipped < self._skips)
        return waits

    def are_full(self) -> None:
        """There was no room for a capture."""
        self._unlooked = _UNLOOKED

    def looks_again(self, entry: Entry, error: OtherSizes) -> bool:
        """Whether a model whose leaves returned other sizes than in their trial run, or whose calls answer otherwise
        than the first, is captured once more. Where they answer now so, now so, no answer is taken any more."""
        if type(error) is OtherSizes:
            if self._answered and entry.executable is not None:
                self._refuted = [replace(entry.executable.capture, refuted=True)]
            self._answered = True
            return True
        self._looks -= (again := self._looks > 0)
        return again

    def fills(self) -> bool:
        """Whether a model that has filled a cache is captured anew."""
        self._fills -= (again := self._fills > 0)
        return again

    def entry(self, args: tuple, kwargs: dict, now: tuple, known: Iterable[Entry]) -> tuple[Entry | None, str]:
        """An entry that serves this call, or None and the reason. known: what serves others.

        Raises:
            NotNow: it failed, or the model was changed meanwhile, and the next call may do better; where the data of
                calls stops the graph, after twice as many calls each time.
        """
        from fxopt.capture import Busy, OtherData, is_passing  # what compiles has paid for this import

        before = Moment(self._original)
        entry, failure, passing, busy = None, "", False, False
        executable, stored = None, dict[nn.Module, set[str]]()
        try:
            executable, stored = self._executable(args, kwargs, known)
            entry = entry_of(self._original, executable, stored, now, before.watch)
        except OtherData as error:
            self._skips, self._skipped = 2 * self._skips + 1, 0
            raise NotNow(f"not captured: {error}") from error
        except Exception as error:
            executable, failure, passing, busy = None, reason_of(error), is_passing(error), isinstance(error, Busy)
            let_go(error)
        if entry is not None and entry.match(args, kwargs, now) is None:
            entry, executable, failure = None, None, "the capture does not fit the call that it was made from"
        if not passing and not before.spoiled(executable, stored):
            self._patience = _PATIENCE
            return entry, failure
        failure = failure or "another thread changed the model meanwhile"
        if busy or self._patience:
            self._patience -= not busy
            raise NotNow(f"not captured: {failure}")
        return None, failure

    def _executable(
        self, args: tuple, kwargs: dict, known: Iterable[Entry]
    ) -> tuple[Executable, dict[nn.Module, set[str]]]:
        """What is made of the forward for such a call, and the attributes that it assigns."""
        from fxopt.capture.generators import undrawn  # the first capture pays for this import

        bare = _without_hooks(self._original)
        earlier = self._refuted + [entry.executable.capture for entry in known if entry.executable is not None]
        with undrawn(self._original), draws_put_back(), saving_as_usual():
            executable = self._compile(bare, args, kwargs, earlier)
        return executable, stored_by(executable.capture, bare, self._original)

    def eager_entry(self, args: tuple, kwargs: dict, now: tuple, reason: str) -> Entry:
        """Of a call that no graph serves."""
        findings = Findings(described(self._original, args, kwargs), eager_reason=reason)
        return Entry(Signature.of_call(args, kwargs), now, Watch(self._original), findings)


def _without_hooks(model: nn.Module) -> nn.Module:
    """`model`, or where hooks hang on it a stand-in that shares all but them: they run around the forward."""
    hooks = {name: type(vars(model)[name])() for name in HOOKS if vars(model)[name]}
    if not hooks:
        return model
    bare = object.__new__(type(model))
    bare.__dict__.update(vars(model), **hooks)
    return bare
