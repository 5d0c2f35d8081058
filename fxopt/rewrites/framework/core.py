"""The one place that edits graphs: transactional rewrites with fuel.

A replacement is inserted beside what it replaces, run on fake tensors and compared; only then do the users move.
Any failure removes the inserted nodes again and gives a reason.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxopt import progress
from fxopt.capture.errors import is_passing
from fxopt.config import Config
from fxopt.findings import Change, Miss, PassFindings, Place
from fxopt.normalize import remove_dead_code
from fxopt.patterns.core import Match, Reject, Search, place_of
from fxopt.rewrites.framework.editor import Editor, Rejected, as_captured, learn, no_new_guards
from fxopt.rewrites.framework.edits import Edits
from fxopt.rewrites.framework.gradient_modes import stay_on_one_side
from fxopt.rewrites.framework.gradient_paths import GradientPaths
from fxopt.rewrites.framework.policy import ALWAYS, Policy
from fxopt.rewrites.framework.regions import before
from fxopt.rewrites.framework.trial import Trial
from fxopt.shape.aliases import has_effects
from fxopt.shape.expressions import is_size
from fxopt.shape.sizes import Size, same, same_shape, tensor_of
from fxopt.shape.standing import edited, reading
from fxopt.shape.strides import Strides, lies_alike, lies_by_sizes
from fxopt.torch_internals.tracing import is_erased
from fxopt.tune.tuner import Tuner

_MOST_ROUNDS = 100  # matches that wait for one another need two or three; one that makes its own pattern, all of them


class _Stale(Exception):
    """A match that was found before another one replaced what it reads: the next round finds it anew."""


@dataclass(frozen=True)
class Replacement:
    """What a rewrite did at one match: new values for old nodes, and the words for the report.

    values: None stands for a node without a value, whose effect never happens.
    equal: sizes that depend on data, each with the size that it is proven to have.
    """

    values: Mapping[Node, Node | None]
    what: str
    why: str
    equal: tuple[tuple[Size, Size], ...] = ()


@dataclass(frozen=True)
class Rewrite:
    """A named pass: find matches (or reasons why not), and replace each.

    find: yields Match and Reject for what it searches.
    replace: builds the replacement of one match through an Editor; raises Rejected where it does not hold.
    why: the reason for its place in the order of passes.
    policy: what has to be known of its speed.
    on_cuda: the policy on a GPU, where it is another one.
    former: other names under which it is known to Config.disable.
    safer_on_cuda: never left out there because the whole graph is slower with it.
    when: whether a configuration asks for it; by default each does.
    """

    name: str
    find: Callable[[Search], Iterator[Match | Reject]]
    replace: Callable[[Editor, Match], Replacement]
    why: str
    policy: Policy = ALWAYS
    on_cuda: Policy | None = None
    former: tuple[str, ...] = ()
    safer_on_cuda: bool = False
    when: Callable[[Config], bool] = lambda config: True

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.former

    def policy_at(self, match: Match) -> Policy:
        return self.on_cuda if self.on_cuda and match.on_cuda else self.policy


@dataclass
class Fuel:
    """How many rewrites may be applied, and which ones (by number) are left out."""

    limit: int | None = None
    skip: frozenset[int] = frozenset()
    used: int = 0

    @property
    def empty(self) -> bool:
        return self.limit is not None and self.used >= self.limit

    def take(self) -> int:
        """The number of the next rewrite."""
        self.used += 1
        return self.used - 1


def apply(
    rewrite: Rewrite,
    module: GraphModule,
    fuel: Fuel,
    inference: bool,
    tuner: Tuner | None = None,
    config: Config = Config(),
) -> PassFindings:
    """Run one pass to its fixed point; every match is a transaction of its own. Without a tuner nothing is timed."""
    findings, started = PassFindings(rewrite.name), time.perf_counter()
    refused: set[str] = set()
    trial = Trial(tuner, not inference) if tuner is not None else None
    paths = functools.cache(lambda: None if inference else GradientPaths(module.graph))  # before the first edit
    edits = functools.cache(lambda: Edits(module.graph))
    commit = functools.partial(_commit, rewrite, module, trial, config)
    for _ in range(_MOST_ROUNDS):
        changed = False
        rejects = []
        for found in _found(rewrite, module, inference, findings):
            if isinstance(found, Reject):
                rejects.append(found)
                continue
            if found.anchor.name in refused or not _alive(found, module):
                continue
            if fuel.empty:
                break
            number = fuel.take()
            try:
                committed = number not in fuel.skip and commit(paths(), edits(), found, findings, number)
            except _Stale:
                continue
            changed |= committed
            if not committed:
                refused.add(found.anchor.name)
        if not changed:
            break
        remove_dead_code(module)
    own = {name for change in findings.changes for name in change.new}  # of what a pass has made it misses nothing
    rejected = [reject.miss(rewrite.name) for reject in rejects if reject.node.name not in own]
    findings.misses = list(dict.fromkeys([*findings.misses, *rejected]))
    findings.seconds = time.perf_counter() - started
    return findings


def _found(rewrite: Rewrite, module: GraphModule, inference: bool, findings: PassFindings) -> list[Match | Reject]:
    """All matches; a pattern that fails costs its own pass and nothing else."""
    try:
        with no_new_guards(module), as_captured(), reading(module.graph):
            return list(rewrite.find(Search(module.graph, inference)))
    except Exception as error:
        if is_passing(error):
            raise
        findings.misses.append(
            Miss(rewrite.name, f"the pattern itself failed, {type(error).__name__}: {error}", Place())
        )
        return []


def _alive(match: Match, module: GraphModule) -> bool:
    """Whether no earlier match of this round has replaced a node that this one speaks of."""
    nodes: list[Node] = [match.anchor]
    map_arg(tuple(match.bound.values()), nodes.append)
    return all(node.graph is module.graph and not is_erased(node) and "replaced" not in node.meta for node in nodes)


def _commit(
    rewrite: Rewrite,
    module: GraphModule,
    trial: Trial | None,
    config: Config,
    paths: GradientPaths | None,
    edits: Edits,
    match: Match,
    findings: PassFindings,
    number: int,
) -> bool:
    """Replace one match. False, with the reason in the findings, where the replacement does not hold."""
    edited(module.graph)
    editor, policy = Editor(module, match.anchor, config), rewrite.policy_at(match)
    place = place_of(match.anchor)
    try:
        replacement = _checked(rewrite, editor, match, edits)
        if _reads_replaced(editor):
            raise _Stale
        if editor.missing and policy.proof:
            raise Rejected(editor.missing)
        if trial is not None and policy.measured:
            progress.step(f"time {rewrite.name} at {place}")
            values, timing = trial.judged(editor, replacement.values, policy)
            replacement = replace(replacement, values=values, why="; ".join(filter(None, (replacement.why, timing))))
        if paths is not None:
            paths.keep(replacement.values)
    except _Stale:
        editor.undo()
        raise
    except Rejected as error:
        editor.undo()
        findings.misses.append(Miss(rewrite.name, str(error), place))
        return False
    except Exception as error:  # whatever it is, the graph stays as it was and the report says so
        editor.undo()
        if is_passing(error):
            raise
        reason = f"{type(error).__name__}: {error}"
        findings.rolled_back.append(Change(number, match.anchor.name, rewrite.name, reason, place))
        return False
    inside = before(list(replacement.values)).inside
    origins = _descend(editor.added, inside)
    dying = set(inside) if policy.measured else set()  # their matches may overlap
    for old in dying.union(replacement.values):
        old.meta["replaced"] = True
    for old, new in replacement.values.items():
        if new is not None:
            old.replace_all_uses_with(new, lambda user: user not in dying)
        if new is None or has_effects(old):  # they are part of what was replaced, and would keep it alive
            module.graph.erase_node(old)
    if editor.missing:
        findings.misses.append(Miss(rewrite.name, editor.missing, place))
    names = tuple(node.name for node in editor.added)
    what, why = replacement.what, replacement.why
    findings.changes.append(Change(number, match.anchor.name, what, why, place, tuple(origins), names))
    return True


def _reads_replaced(editor: Editor) -> bool:
    """Whether a value would be computed once more, in its old spelling, whose rounding may be another one."""
    return any("replaced" in read.meta for node in editor.added for read in node.all_input_nodes)


def _descend(added: Sequence[Node], replaced: Sequence[Node]) -> dict[str, None]:
    """Tells new nodes which nodes of the captured graph they stand for: meta["origins"], names in graph order."""
    origins = {name: None for node in replaced for name in node.meta.get("origins", (node.name,))}
    for node in added:
        node.meta["origins"] = origins
    return origins


def _checked(rewrite: Rewrite, editor: Editor, match: Match, edits: Edits) -> Replacement:
    with no_new_guards(editor.module):
        replacement = rewrite.replace(editor, match)
        replacement = replace(replacement, values=edits.keep(editor, replacement.values))
        stay_on_one_side(editor, replacement.values)
    for unknown, known in replacement.equal:
        learn(unknown, known)
    strides = functools.cache(lambda: Strides(editor.module.graph))
    for old, new in replacement.values.items():
        if new is None and not old.users:
            continue
        if new is not None and is_size(old) and is_size(new) and same(old.meta["val"], new.meta["val"]):
            continue
        before, after = tensor_of(old), tensor_of(new)
        if before is None or after is None:
            raise Rejected(f"'{old.name}' is not a tensor")
        if before.dtype != after.dtype or not same_shape(old, new):  # type: ignore[arg-type]
            raise Rejected(
                f"'{old.name}': expected {before.dtype} {list(before.shape)}, found {after.dtype} {list(after.shape)}"
            )
        alike = lies_alike(old, new) and not lies_by_sizes(old)  # type: ignore[arg-type]
        if not alike and not strides().may_become(old, new):  # type: ignore[arg-type]
            raise Rejected(f"the strides of '{old.name}' are seen, and would differ")
    _keep_order(editor, replacement.values)
    return replacement


def _keep_order(editor: Editor, values: Mapping[Node, Node | None]) -> None:
    """Raises Rejected where a value would be read in front of what computes it."""
    for node in editor.added:
        if late := [read.name for read in node.all_input_nodes if node < read]:
            raise Rejected(f"'{node.name}' would read '{late[0]}' before it could be computed")
    new_of = {old: new for old, new in values.items() if new is not None}
    early = {user: old for old, new in new_of.items() for user in old.users if user < new}
    if early and (readers := early.keys() - set(before(list(values)).inside)):
        first = min(readers)
        raise Rejected(f"'{early[first].name}' is read by '{first.name}' before it could be computed")
