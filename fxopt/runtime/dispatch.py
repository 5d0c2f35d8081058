"""From one call to the capture that serves it: match, capture under a lock, or run the model as it is."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxopt import trees
from fxopt.config import Config
from fxopt.findings import Findings
from fxopt.locks import WAIT, lock
from fxopt.runtime.context import ambient
from fxopt.runtime.entry import Entry, Tensors, entry_of, stored_by
from fxopt.runtime.executable import Compile, run_eagerly
from fxopt.runtime.moment import Moment, NotNow
from fxopt.runtime.signature import Signature, holds_array, unsupported
from fxopt.runtime.traced import UnderDynamo
from fxopt.runtime.undo import TooMuch
from fxopt.runtime.watch import Watch
from fxopt.shape.conditions import OtherSizes
from fxopt.torch_internals.autograd import StopRecomputation, hooks_on_saved_tensors, saving_as_usual
from fxopt.torch_internals.hooks import HOOKS
from fxopt.torch_internals.modes import is_transformed
from fxopt.torch_internals.seeds import draws_put_back
from fxopt.tracebacks import let_go

if TYPE_CHECKING:
    from fxopt.runtime.sharded.calls import ShardedCalls

_log = logging.getLogger(__name__)
_PATIENCE = 3  # captures in a row that fail for a passing reason, before one that fails is taken at its word
_REJECTED = 2  # calls in a row, before the model is asked ahead of a capture, which takes 30 to 330 ms
_UNLOOKED = 63  # misses; to look through 16 captures takes 300 us, a call of a small model 40
_MANY, _UNASKED = 64, 15  # a look at a call takes 20 us, as much as two layers
_LOOKS = 3  # graphs of a model whose leaves return other sizes than in their trial run, before such calls stay eager


class Dispatcher:
    """The runtime state of one optimized model. A known signature takes no lock.

    Args:
        original: the module to run eagerly and to compile.
        compile: ``compile(model, args, kwargs, earlier)`` makes an Executable, or raises. earlier: other captures.

    Attributes:
        entries: the signatures seen, replaced as a whole when one is added.
        refused: why calls ran eagerly without an entry, and how that reads in the report.
        sharded: serves all calls while a submodule communicates with other processes.
        dynamo: what Dynamo has to do with this model.
        quiet: whether nobody is warned where the model stays eager; else the first reason is, once.
        compiled: what ``Module.compile()`` made of the optimized model.
    """

    def __init__(self, original: nn.Module, compile: Compile, config: Config) -> None:
        self.original = original
        self.compile = compile
        self.config = config
        self.entries: tuple[Entry, ...] = ()
        self.refused: dict[str, Findings] = {}
        self.dynamo = UnderDynamo(self)
        self.sharded: ShardedCalls | None = None
        self._silent: list[tuple[int, bool]] = []  # the modules, when none of them communicated
        self.quiet = False
        self.compiled: Callable[..., Any] | None = None
        self._refused_arrays = False  # by the last miss, so that the next one need not find the reason
        self._lock = lock()
        self._patience, self._looks = _PATIENCE, _LOOKS
        self._by_eager = self._unasked = 0  # calls so far that were eager's; calls to come that are not looked at
        self._rejected = 0  # calls in a row that no capture served and that the model refuses
        self._unlooked = 0  # misses to come that run eagerly, where there is no room for another capture
        self._skips = self._skipped = 0  # misses that stay eager, since the data of one stopped the graph made from it

    @property
    def findings(self) -> list[Findings]:
        sharded = self.sharded.findings if self.sharded is not None else ()
        return [*(entry.findings for entry in self.entries), *self.refused.values(), *sharded]

    def __reduce__(self) -> tuple:
        return Dispatcher, (self.original, self.compile, self.config)

    def __deepcopy__(self, memo: dict) -> Dispatcher:
        return Dispatcher(copy.deepcopy(self.original, memo), self.compile, self.config)

    def __call__(self, eager: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """One forward. `eager(*args, **kwargs)` is the original one, bound to the module that was called.

        The caller has asked is_compiling().
        """
        if self._unasked > 0 and not hooks_on_saved_tensors():
            self._unasked -= 1
            return eager(*args, **kwargs)
        if is_transformed():
            return eager(*args, **kwargs)
        if self.sharded is not None and not self.sharded.over:
            return self.sharded(eager, args, kwargs)
        now = ambient()
        for entry in self.entries:
            tensors = entry.match(args, kwargs, now)
            if tensors is not None:
                return self._run(entry, tensors, eager, args, kwargs)
        if found := _serving(self._other_forms(), args, kwargs, now):
            return self._run(*found, eager, args, kwargs)
        return self._miss(eager, args, kwargs, now)

    def prepare(self, args: tuple, kwargs: dict | None = None) -> None:
        """Capture for these inputs now, if no entry serves them. Raises what the eager model raises on them."""
        kwargs, now = kwargs or {}, ambient()
        refusal = self._communication() or unsupported(args, kwargs)
        if refusal:
            self._refuse(refusal)
            return
        self._unasked = 0
        with self._lock:
            if self.find(args, kwargs, now) is None:
                try:
                    entry, failure = self._compiled(args, kwargs, now)
                except NotNow as reason:
                    self._refuse(str(reason))
                    return
                if entry is not None:
                    self.entries = (entry, *self.entries)
                    return
                rehearse(self.original, args, kwargs)
                self._warn(failure)
                self.entries = (*self.entries, self._eager_entry(args, kwargs, now, failure))

    def find(self, args: tuple, kwargs: dict, now: tuple) -> tuple[Entry, Tensors] | None:
        """The entry that serves a call, and what it runs on."""
        return _serving((*self.entries, *self._other_forms()), args, kwargs, now)

    def _of_one_batch(self, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """What a call is captured as, where its features have batch sizes of their own."""
        if not trees.features_in((args, kwargs)):
            return None
        from fxopt.runtime.keyed.forms import of_one_batch

        return of_one_batch(self.original, args, kwargs)

    def _other_forms(self) -> list[Entry]:
        return [entry.other_forms for entry in self.entries if entry.other_forms is not None]

    def _communication(self) -> str:
        """Why nothing is captured ahead of a call; from here on, calls of a model that communicates are its own."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return ""
        from fxopt.runtime.sharded.calls import ShardedCalls
        from fxopt.runtime.sharded.communication import communicating

        tree = [(id(module), "forward" in vars(module)) for module in self.original.modules()]
        if tree == self._silent:
            return ""
        if not communicating(self.original):
            self._silent = tree
            return ""
        self.sharded = ShardedCalls(self.original, functools.partial(_part, self.compile, self.config), self.config)
        return (
            "a submodule communicates with other processes, so it runs in calls of the user's alone, not ahead of them"
        )

    def _miss(self, eager: Callable, args: tuple, kwargs: dict, now: tuple) -> Any:
        if self._communication():
            return self(eager, args, kwargs)
        if self._unlooked and len(self.entries) >= self.config.max_captures:
            self._unlooked -= 1
            return eager(*args, **kwargs)
        if self._rejected >= _REJECTED:
            result = eager(*args, **kwargs)
            self._rejected = 0
            return result
        arrays = holds_array((args, kwargs))
        if arrays and self._refused_arrays:
            return eager(*args, **kwargs)
        refusal, self._refused_arrays = unsupported(args, kwargs), arrays
        if not refusal:
            if not self._lock.acquire(timeout=WAIT):
                self._refuse(f"another thread's capture took more than {WAIT} s")
                return eager(*args, **kwargs)
            try:
                for entry in self.entries:
                    entry.learn_form(self.original, args, kwargs, now)
                found = self.find(args, kwargs, now)  # another thread may have been first
                if found is None:
                    self.entries = tuple(entry for entry in self.entries if entry.watch.same_tree())
                    if self._skipped < self._skips:
                        self._skipped += 1
                        return eager(*args, **kwargs)
                    if len(self.entries) < self.config.max_captures:
                        return self._first_call(eager, args, kwargs, now)
                    refusal = f"one signature more than Config.max_captures = {self.config.max_captures}"
                    self._unlooked = _UNLOOKED
            finally:
                self._lock.release()
            if found is not None:
                return self._run(*found, eager, args, kwargs)
        self._refuse(refusal)
        return eager(*args, **kwargs)

    def _refuse(self, reason: str) -> None:
        self.refused.setdefault(reason, Findings(eager_reason=reason))
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if not self.quiet:
            self.quiet = True
            _log.warning("%s stays eager for some inputs: %s", type(self.original).__name__, reason)

    def _first_call(self, eager: Callable, args: tuple, kwargs: dict, now: tuple) -> Any:
        """Compile, remember, run. Inputs that the eager model rejects leave no trace."""
        before = Watch(self.original)
        try:
            args, kwargs = self._of_one_batch(args, kwargs) or (args, kwargs)
            entry, failure = self._compiled(args, kwargs, now)
        except NotNow as reason:
            self._refuse(str(reason))
            return eager(*args, **kwargs)
        if entry is not None:
            self.entries = (entry, *self.entries)
            return self._run(entry, entry.match(args, kwargs, now) or ((), ()), eager, args, kwargs)
        plain = self._eager_entry(args, kwargs, now, failure)  # of the arguments as they are before the call
        self._rejected += 1
        result = eager(*args, **kwargs)
        self._rejected = 0
        self._warn(failure)
        changing = frozenset(map(str, before.changed()))
        self.entries = (*self.entries, replace(plain, watch=Watch(self.original, ignore=changing)))
        return result

    def _eager_entry(self, args: tuple, kwargs: dict, now: tuple, reason: str) -> Entry:
        findings = Findings(described(self.original, args, kwargs), eager_reason=reason)
        return Entry(Signature.of_call(args, kwargs), now, Watch(self.original), findings)

    def _compiled(self, args: tuple, kwargs: dict, now: tuple) -> tuple[Entry | None, str]:
        """An entry that serves this call, or None and the reason.

        Raises:
            NotNow: it failed, or the model was changed meanwhile, and the next call may do better; where the data of
                calls stops the graph, after twice as many calls each time.
        """
        from fxopt.capture import Busy, OtherData, is_passing  # what compiles has paid for this import

        before, bare = Moment(self.original), without_hooks(self.original)
        executable, stored, failure, passing, busy = None, dict[nn.Module, set[str]](), "", False, False
        entry: Entry | None = None
        earlier = [known.executable.capture for known in self.entries if known.executable is not None]
        try:
            from fxopt.capture.generators import undrawn  # the first capture pays for this import

            with undrawn(self.original), draws_put_back(), saving_as_usual():
                executable = self.compile(bare, args, kwargs, earlier)
            stored = stored_by(executable.capture, bare, self.original)
            entry = entry_of(self.original, executable, stored, now, before.watch)
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

    def _run(self, entry: Entry, tensors: Tensors, eager: Callable, args: tuple, kwargs: dict) -> Any:
        if entry.executable is None or entry.executable.turns is not None:
            return self._run_either(entry, tensors, eager, args, kwargs)
        return self._run_graph(entry, tensors, eager, args, kwargs)

    def _run_either(self, entry: Entry, tensors: Tensors, eager: Callable, args: tuple, kwargs: dict) -> Any:
        if entry.stays_eager:
            self._rest()
        if entry.executable is None or entry.executable.turns is None:
            return eager(*args, **kwargs)
        graph = functools.partial(self._run_graph, entry, tensors, eager, args, kwargs)
        return entry.executable.turns.run(tensors[1], graph, functools.partial(eager, *args, **kwargs))

    def _rest(self) -> None:
        """Some calls to come run without a look, where many have been eager's, and none would be a graph's."""
        self._by_eager += 1
        if self._by_eager > _MANY and all(entry.stays_eager for entry in self.entries):
            self._unasked = _UNASKED

    def _run_graph(self, entry: Entry, tensors: Tensors, eager: Callable, args: tuple, kwargs: dict) -> Any:
        try:
            flat = entry.serve(*tensors) if entry.serve else entry.run(*tensors[0], *tensors[1])
        except StopRecomputation:  # checkpointing's own: it has what it wanted, in the middle of the graph
            raise
        except Exception as error:
            failure = error
        else:
            return entry.result(flat, args, kwargs) if entry.filled else entry.rebuild(flat)
        try:
            return self._recover(entry, failure, eager, args, kwargs)
        finally:
            del failure  # whose traceback holds this frame, and that the call's tensors

    def _recover(self, entry: Entry, error: Exception, eager: Callable, args: tuple, kwargs: dict) -> Any:
        """An error of the call stays an error; where eager has none, the graph is wrong and goes. Sizes that data gave
        and that it is not for are no error: it waits for the next call. Other sizes of a leaf's results tell more than
        its trial run did, so that the next call is captured once more."""
        try:
            result = run_eagerly(error, eager, args, kwargs)
        except BaseException:
            del error
            raise
        if type(error) is OtherSizes:
            return result
        if isinstance(error, OtherSizes) and self._looks:
            self._looks -= 1
            self._replace(entry, None)
            return result
        reason = f"the optimized graph raised {type(error).__name__} where eager does not: {error}"
        self._warn(reason)
        plain = replace(
            entry,
            executable=None,
            state=None,
            sizes=None,
            sharing=None,
            findings=replace(entry.findings, eager_reason=reason),
        )
        self._replace(entry, plain)
        return result

    def _replace(self, entry: Entry, by: Entry | None) -> None:
        with self._lock:
            entries = [by if entry in (e, e.other_forms) else e for e in self.entries]
            self.entries = tuple(e for e in entries if e is not None)


def _serving(entries: Iterable[Entry], args: tuple, kwargs: dict, now: tuple) -> tuple[Entry, Tensors] | None:
    """The first entry that serves a call, and what it runs on."""
    for entry in entries:
        tensors = entry.match(args, kwargs, now)
        if tensors is not None:
            return entry, tensors
    return None


def _part(compile: Compile, config: Config, module: nn.Module) -> nn.Module:
    """A drop-in for what does not communicate."""
    from fxopt.runtime.module import optimized

    config = replace(config, leaves=())  # the leaves are boundaries
    own = functools.partial(compile.func, config) if isinstance(compile, functools.partial) else compile
    return optimized(module, own, config)


def without_hooks(model: nn.Module) -> nn.Module:
    """`model`, or where hooks hang on it a stand-in that shares all but them: they run around the forward."""
    hooks = {name: type(vars(model)[name])() for name in HOOKS if vars(model)[name]}
    if not hooks:
        return model
    bare = object.__new__(type(model))
    bare.__dict__.update(vars(model), **hooks)
    return bare


def reason_of(error: Exception) -> str:
    """A failed compile for the report: a CaptureError says where by itself, any other error gets its last line."""
    from fxopt.capture import CaptureError

    if isinstance(error, CaptureError | TooMuch):
        return str(error)
    *_, last = traceback.extract_tb(error.__traceback__)
    message = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"the capture failed in {last.name} at {'/'.join(Path(last.filename).parts[-2:])}:{last.lineno}: {message}"


def described(model: nn.Module, args: tuple, kwargs: dict) -> str:
    """The inputs of one call as a person writes them: "float32[64, 13], int64[64, 26]; eval"."""
    tensors = [leaf for leaf in trees.leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    inputs = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{_sizes(t)}" for t in tensors)
    return f"{inputs}; {'train' if model.training else 'eval'}"


def _sizes(tensor: Tensor) -> str:
    return "[nested]" if tensor.is_nested else str(list(tensor.shape))


def rehearse(model: nn.Module, args: tuple, kwargs: dict) -> None:
    """Run the model once and leave nothing behind, if that can be. Raises what it raises."""
    from fxopt.capture import CaptureError
    from fxopt.capture.generators import undrawn  # the first capture has paid for these imports
    from fxopt.capture.reach import Reach
    from fxopt.capture.untouched import Look, looked

    if Reach(model).once:
        return
    look = Look()
    with torch.inference_mode(False), torch.no_grad(), undrawn(model):
        root = look.copy(model).root
        inputs, keywords = look.own_inputs((args, kwargs))
        with contextlib.suppress(CaptureError):
            looked(look, root, *inputs, **keywords)
