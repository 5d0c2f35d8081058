"""From one call to the capture that serves it: match, capture under a lock, or run the model as it is."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxopt import trees
from fxopt.config import Config
from fxopt.findings import Findings
from fxopt.locks import WAIT, lock
from fxopt.runtime.attempts import Attempts
from fxopt.runtime.context import ambient
from fxopt.runtime.entry import REFUSED, Entry, Tensors
from fxopt.runtime.executable import Compile, run_eagerly
from fxopt.runtime.moment import NotNow
from fxopt.runtime.recomputed import Noted, Recomputed
from fxopt.runtime.rehearsal import rehearse
from fxopt.runtime.signature import unsupported
from fxopt.runtime.traced import UnderDynamo
from fxopt.runtime.watch import Watch
from fxopt.shape.conditions import OtherSizes
from fxopt.torch_internals.autograd import Checkpoint, StopRecomputation, checkpoint_of, hooks_on_saved_tensors
from fxopt.torch_internals.modes import is_transformed

if TYPE_CHECKING:
    from fxopt.runtime.sharded.calls import ShardedCalls

_log = logging.getLogger(__name__)
_MANY, _UNASKED = 64, 15  # a look at a call takes 20 us, as much as two layers


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
        self._lock = lock()
        self._recomputed = Recomputed()
        self._attempts = Attempts(original, compile)
        self._by_eager = self._unasked = 0  # calls so far that were eager's; calls to come that are not looked at

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
        hooks = hooks_on_saved_tensors()
        checkpoint = checkpoint_of(hooks) if hooks is not None and type(eager) is not Noted else None
        if checkpoint is not None and (self.sharded is None or self.sharded.over):
            return self._checkpointed(checkpoint, eager, args, kwargs)
        if self._unasked > 0:
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

    def _checkpointed(self, checkpoint: Checkpoint, eager: Callable, args: tuple, kwargs: dict) -> Any:
        """A call within a checkpoint, whose recomputation is served by what served the forward."""
        noted = Noted(eager)
        if checkpoint.recomputation is None:
            self._recomputed.begin(checkpoint, noted)
            result = self(noted, args, kwargs)
            if not noted.ran and (found := self.find(args, kwargs, ambient())):
                noted.entry = found[0]
            return result
        if (again := self._recomputed.next(checkpoint)) is None:
            return self(noted, args, kwargs)
        tensors = again.entry.match(args, kwargs, ambient()) if again.entry is not None else None
        if again.entry is None or tensors is None:
            return eager(*args, **kwargs)
        return self._run_graph(again.entry, tensors, eager, args, kwargs)

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
                    entry, failure = self._attempts.entry(args, kwargs, now, self.entries)
                except NotNow as reason:
                    self._refuse(str(reason))
                    return
                if entry is not None:
                    self.entries = (entry, *self.entries)
                    return
                rehearse(self.original, args, kwargs)
                self._warn(failure)
                self.entries = (*self.entries, self._attempts.eager_entry(args, kwargs, now, failure))

    def find(self, args: tuple, kwargs: dict, now: tuple) -> tuple[Entry, Tensors] | None:
        """The entry that serves a call, and what it runs on."""
        return _serving((*self.entries, *self._other_forms()), args, kwargs, now)

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
        if self._attempts.passes_by(args, kwargs, full=len(self.entries) >= self.config.max_captures):
            return eager(*args, **kwargs)
        if self._attempts.asks_first():
            return self._attempts.ask(eager, args, kwargs)
        refusal = self._attempts.refusal(args, kwargs)
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
                    if self._attempts.skips():
                        return eager(*args, **kwargs)
                    if len(self.entries) < self.config.max_captures:
                        return self._first_call(eager, args, kwargs, now)
                    refusal = f"one signature more than Config.max_captures = {self.config.max_captures}{self._fixed()}"
                    self._attempts.are_full()
            finally:
                self._lock.release()
            if found is not None:
                return self._run(*found, eager, args, kwargs)
        self._refuse(refusal)
        self._rest()
        return eager(*args, **kwargs)

    def _fixed(self) -> str:
        """The line that fixes a size, so that each has a capture of its own."""
        executables = [entry.executable for entry in self.entries if entry.executable is not None]
        fixed = next((miss for each in executables for miss in each.capture.fixed), None)
        return f": {fixed.place} {fixed.reason}" if fixed is not None else ""

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
            args, kwargs = _of_one_batch(self.original, args, kwargs) or (args, kwargs)
            entry, failure = self._attempts.entry(args, kwargs, now, self.entries)
        except NotNow as reason:
            self._refuse(str(reason))
            return eager(*args, **kwargs)
        if entry is not None:
            self.entries = (entry, *self.entries)
            return self._run(entry, entry.match(args, kwargs, now) or ((), ()), eager, args, kwargs)
        plain = self._attempts.eager_entry(args, kwargs, now, failure)  # of the arguments as they are before the call
        result = self._attempts.ask(eager, args, kwargs)
        changing = frozenset(map(str, before.changed()))
        if not changing:
            self._warn(failure)
        watch, left = Watch(self.original, ignore=changing), Watch(self.original) if changing else None
        self.entries = (*self.entries, replace(plain, watch=watch, left=left))
        return result

    def _run(self, entry: Entry, tensors: Tensors, eager: Callable, args: tuple, kwargs: dict) -> Any:
        if entry.executable is None or entry.executable.turns is not None:
            return self._run_either(entry, tensors, eager, args, kwargs)
        return self._run_graph(entry, tensors, eager, args, kwargs)

    def _run_either(self, entry: Entry, tensors: Tensors, eager: Callable, args: tuple, kwargs: dict) -> Any:
        if entry.stays_eager:
            self._rest()
        if entry.left is not None:
            return self._later_call(entry, entry.left, eager, args, kwargs)
        if entry.executable is None or entry.executable.turns is None:
            return eager(*args, **kwargs)
        graph = functools.partial(self._run_graph, entry, tensors, eager, args, kwargs)
        return entry.executable.turns.run(tensors[1], graph, functools.partial(eager, *args, **kwargs))

    def _later_call(self, entry: Entry, left: Watch, eager: Callable, args: tuple, kwargs: dict) -> Any:
        """The call after one that changed the model, run eagerly. If it changes nothing, a cache stands (a mask, the
        angles of positions), and the next call is captured. After some that do, the model is taken for one that counts.
        """
        result = eager(*args, **kwargs)
        if left.holds():
            entry.left = None
            with self._lock:
                if entry in self.entries and self._attempts.fills():
                    self._replace(entry, None)
                    return result
        else:
            entry.unsettled -= 1
            entry.left = Watch(self.original) if entry.unsettled > 0 else None
        if entry.left is None:
            self._warn(entry.findings.eager_reason)
        return result

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
            if entry.refused:
                entry.served()
            return entry.result(flat, args, kwargs) if entry.filled else entry.rebuild(flat)
        try:
            return self._recover(entry, failure, eager, args, kwargs)
        finally:
            del failure  # whose traceback holds this frame, and that the call's tensors

    def _recover(self, entry: Entry, error: Exception, eager: Callable, args: tuple, kwargs: dict) -> Any:
        """An error of the call stays an error; where eager has none, the graph is wrong and goes. Sizes that data gave
        and that it is not for are no error: it waits for the next call. So it does after a bad id, which the model may
        catch, and after an answer that is not the first call's, unless there are many. Those, and other sizes of a
        leaf's results, tell more than the call that was captured, so that the next one is captured once more."""
        if type(eager) is Noted:
            eager.entry = entry
        try:
            result = run_eagerly(error, eager, args, kwargs)
        except BaseException:
            del error
            raise
        if entry.may_wait(error):
            return result
        if isinstance(error, OtherSizes) and self._attempts.looks_again(entry, error):
            self._replace(entry, None)
            return result
        often = f" in {REFUSED} calls in a row (does the model catch it?)" if getattr(error, "of_data", False) else ""
        reason = f"the optimized graph raised {type(error).__name__} where eager does not{often}: {error}"
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


def _of_one_batch(model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """What a call is captured as, where its features have batch sizes of their own."""
    if not trees.features_in((args, kwargs)):
        return None
    from fxopt.runtime.keyed.forms import of_one_batch

    return of_one_batch(model, args, kwargs)


def _part(compile: Compile, config: Config, module: nn.Module) -> nn.Module:
    """A drop-in for what does not communicate."""
    from fxopt.runtime.module import optimized

    config = replace(config, leaves=())  # the leaves are boundaries
    own = functools.partial(compile.func, config) if isinstance(compile, functools.partial) else compile
    return optimized(module, own, config)
