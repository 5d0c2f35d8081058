"""One signature of a model: what serves its calls, and how a call is known to be one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fxopt import trees
from fxopt.findings import Findings
from fxopt.runtime import hooked
from fxopt.runtime.executable import Executable
from fxopt.runtime.flatten import rebuilder
from fxopt.runtime.signature import Sharing, Signature, Sizes, State
from fxopt.runtime.traced import traced_view
from fxopt.runtime.undo import TooMuch, Undo
from fxopt.runtime.watch import Watch
from fxopt.shape.conditions import OtherSizes

if TYPE_CHECKING:
    from fxopt.capture import Capture
    from fxopt.capture.effects import StoreAttribute


REFUSED = 16  # bad ids in a row, which the model catches: one bad request is not to make a server slow
_SERVED = 4  # calls that a graph serves for each that answers otherwise; one that serves fewer goes
_SLOTS_A_CALL = 64  # 1 to 4 us

Tensors = tuple[Sequence[Tensor], Sequence[Tensor]]  # state, inputs
Serve = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Any]]


@dataclass(eq=False)
class Entry:
    """One signature: compiled, or (executable None) known to stay eager.

    left: the model as the last eager call left it, while it is not known whether calls change it each time.
    unsettled: how many more calls may change it, before all are taken to.
    refused: calls whose data the graph refuses and the model does not: bad ids in a row; or other answers than the
        first call's, less a quarter of the calls since that were served.
    fills: whether attributes of the arguments that the forward assigns get their values from the graph.
    other_forms: serves calls whose features have another form (keyed/), once there was a call to learn it from.
    """

    signature: Signature
    ambient: tuple
    watch: Watch
    findings: Findings
    executable: Executable | None = None
    state: State | None = None
    sizes: Sizes | None = None
    sharing: Sharing | None = None
    left: Watch | None = None
    unsettled: int = 3
    refused: float = 0
    fills: bool = True
    other_forms: Entry | None = None

    def __post_init__(self) -> None:
        if self.executable is not None:
            self.run, with_gradients = self.executable.run, self.ambient[0]
            self.serve: Serve | None = getattr(self.run, "serve", None)
            if with_gradients:
                self.run, self.serve = hooked.around(self.run), None
            self.rebuild = rebuilder(self.executable.capture.out_spec)
            self.filled = self.executable.capture.filled
        self.traced = traced_view(self)
        self._stood, self._unlooked = False, 0  # what the last look said of a model that stays eager, for so many calls

    @property
    def stays_eager(self) -> bool:
        """Whether no call of the sizes that came so far is the graph's."""
        if self.executable is None:
            return True
        return self.executable.turns is not None and self.executable.turns.all_by_eager

    def result(self, flat: Sequence[Any], args: tuple, kwargs: dict) -> Any:
        """The model's result from the graph's, whose further values go into the arguments."""
        result, values = self.rebuild(flat)
        if self.fills:
            trees.fill((args, kwargs), self.filled, values)
        return result

    def may_wait(self, error: Exception) -> bool:
        """Whether a graph that raised where eager did not stays, since that is due to the data of one call."""
        if type(error) is OtherSizes and not self._takes_answers:
            return True
        self.refused += 1
        return (type(error) is OtherSizes or getattr(error, "of_data", False)) and self.refused < REFUSED

    def served(self) -> None:
        """A call was served after some that were not."""
        self.refused = max(0, self.refused - 1 / _SERVED) if self._takes_answers else 0

    @property
    def _takes_answers(self) -> bool:
        return self.executable is not None and bool(self.executable.capture.taken)

    def match(self, args: tuple, kwargs: dict, now: tuple) -> Tensors | None:
        """State and inputs for `run`, or None when this entry does not serve the call."""
        inputs = self.signature.bind(args, kwargs)
        if inputs is None or self.ambient != now or not self._stands():
            return None
        if self.state is None:
            return (), inputs
        if self.sizes is not None and not self.sizes.hold():
            return None
        state = self.state.read()
        if state is None:
            return None
        apart = self.sharing is None or self.sharing.holds([*state, *inputs])
        return (state, inputs) if apart else None

    def _stands(self) -> bool:
        """Whether the model is as it was. Where calls stay eager, only what may be captured now depends on that, so a
        look that takes longer is for more calls: 3,241 slots (einx) took 185 us of each call, the model 35."""
        if self.executable is not None:
            return self.watch.holds()
        if not self._unlooked:
            self._stood, self._unlooked = self.watch.holds(), 1 + self.watch.size // _SLOTS_A_CALL
        self._unlooked -= 1
        return self._stood

    def learn_form(self, model: nn.Module, args: tuple, kwargs: dict, now: tuple) -> None:
        """See whether a call that the model would serve in this mode differs in the form of its features alone."""
        if self.executable is None or self.other_forms is not None or self.ambient != now or not self.watch.holds():
            return
        from fxopt.runtime.keyed.forms import any_form

        flatten = any_form(self.executable.capture, model, args, kwargs)
        if flatten is not None:
            self.other_forms = replace(self, signature=self.signature.flattened_by(flatten), fills=False)


def entry_of(
    model: nn.Module, executable: Executable, stored: dict[nn.Module, set[str]], now: tuple, before: Watch
) -> Entry:
    """The entry of what was compiled for `model`, as `before` saw it; `stored`: the attributes that it assigns.

    Raises:
        TooMuch: calls would have to keep, or to compare, too much.
    """
    capture = executable.capture
    undo = Undo(executable, model)
    if undo.needed:
        executable.run = undo.around(executable.run)
    leaves, touched = tuple(leaf.path for leaf in capture.leaves), _touched_by_leaves(capture)
    watch = Watch(model, leaves, ignore=touched, stored=stored, since=before, read=capture.read)
    if watch.too_large:
        raise TooMuch(
            f"{watch.too_large[0]}, more than each call can compare; keep fixed numbers in a buffer, or make an array "
            "read-only by setflags(write=False)"
        )
    if shared := watch.shared_memory(model):
        raise TooMuch(f"{shared} shares its memory with a NumPy array that code of the model names")
    sizes, sharing = Sizes(model, capture, _not_asked(capture)), Sharing(capture)
    return Entry(
        Signature.of_capture(capture), now, watch, executable.findings, executable, State(model, capture),
        sizes if sizes.any else None, sharing if sharing.any else None,
    )  # fmt: skip


def stored_by(capture: Capture, stand_in: nn.Module, original: nn.Module) -> dict[nn.Module, set[str]]:
    """The attributes that a capture assigns from now on, by module; those of the stand-in are the original's."""
    stores = _stores_of(capture)
    for store in stores:
        store.release(original if store.module is stand_in else store.module)
    return _names_by_module(stores)


def _not_asked(capture: Capture) -> dict[nn.Module, set[str]]:
    """The attributes that the capture assigns and does not look at before, by module."""
    return _names_by_module(store for store in _stores_of(capture) if not store.asked)


def _stores_of(capture: Capture) -> list[StoreAttribute]:
    from fxopt.capture.effects import stores_of  # the capture has paid for this import

    return list(stores_of(capture.graph))


def _names_by_module(stores: Iterable[StoreAttribute]) -> dict[nn.Module, set[str]]:
    names: dict[nn.Module, set[str]] = {}
    for store in stores:
        names.setdefault(store.module, set()).add(store.name)
    return names


def _touched_by_leaves(capture: Capture) -> frozenset[str]:
    """What opaque submodules change of themselves, by the names that a watch has for it."""
    children: list[Any] = list(capture.graph.children())
    calls = [call for call in children if hasattr(call, "signature")]
    return frozenset(f"{path}.{name}".lstrip(".") for call in calls for path, name in call.signature.touched)
