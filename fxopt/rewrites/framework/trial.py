"""Whether a replacement pays on this machine: everywhere, nowhere, or up to some batch size."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from fxopt.kernels import reports
from fxopt.kernels.by_rows.op import up_to
from fxopt.rewrites.framework.editor import Editor, Rejected
from fxopt.rewrites.framework.policy import Policy
from fxopt.rewrites.framework.regions import (
    COMPUTES,
    after,
    before,
    calls_of,
    closed,
    inputs_of,
    module_of,
    rows_in,
    site,
)
from fxopt.shape.aliases import makes_results
from fxopt.shape.rows import keeps_rows
from fxopt.tune.tuner import Disagreement, Site, Tuner, Unfit, Verdict

Values = Mapping[Node, Node | None]


@dataclass(frozen=True)
class Trial:
    """Times what each replacement takes away against what it adds.

    On a GPU both are timed as captured graphs: fewer launches are no reason where graphs are replayed, and help
    elsewhere anyway. What there is no time for is judged as the last that there was.
    """

    tuner: Tuner
    training: bool
    timed: list[Verdict] = field(default_factory=list)

    def judged(self, editor: Editor, values: Values, policy: Policy) -> tuple[Values, str]:
        """The values to put in place of the old ones, and a few words for the report.

        Raises:
            Rejected: the replacement is slower here at every batch size, there is no proof, or it cannot be timed.
        """
        if self.tuner.effort.seconds == 0 or None in values.values():
            if policy.proof:
                raise Rejected("nothing is timed, and it is not known to be faster")
            return values, ""
        news = [new for new in values.values() if new is not None]
        regions = [closed(before(list(values))), after(editor.added, news)]
        inputs = inputs_of(regions)
        graphs = [region.graph(inputs) for region in regions]
        timed = site(graphs, inputs, self.training, policy.rows)
        try:
            with _reports_of_samples(timed):
                verdict = self.tuner.verdict(timed)
        except (Disagreement, Unfit) as error:
            raise Rejected(str(error)) from None
        if verdict.ratios:
            self.timed.append(verdict)
        elif self.timed and not self.timed[-1].gains:
            raise Rejected(f"{verdict.reason}, and the one that was timed last would be slower: {self.timed[-1]}")
        if verdict.slower or (policy.everywhere and verdict.mixed):
            raise Rejected(f"it would be slower on this machine: {verdict}")
        if (policy.proof or (policy.rows and verdict.ratios)) and not verdict.faster:
            raise Rejected(f"it would be no faster on this machine: {verdict}")
        if verdict.mixed and (either := _either(editor, values, graphs, inputs, timed, verdict)):
            return either
        if verdict.mixed and not verdict.gains:
            raise Rejected(f"it would lose more on this machine than it gains: {verdict}")
        return values, str(verdict)


@contextlib.contextmanager
def _reports_of_samples(timed: Site) -> Iterator[None]:
    """What kernels on a GPU report of ids that were made up is no later call's to raise."""
    device = next((value.device for value in timed.values if isinstance(value, torch.Tensor) and value.is_cuda), None)
    if device is None:
        yield
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    if reports.reported(index):
        raise Rejected(
            f"an earlier call on {device} has an error that the next call raises; until then nothing is timed"
        )
    try:
        yield
    finally:
        while reports.failure(index):
            pass


def _either(
    editor: Editor, values: Values, graphs: list[Graph], inputs: list[Node], timed: Site, verdict: Verdict
) -> tuple[Values, str] | None:
    """A call that picks one of the two graphs by the number of rows. None where no input tells it in time."""
    rows = rows_in(inputs)
    if rows is None or any(node not in editor.added and not node < editor.point for node in inputs):
        return None
    most, few = verdict.split()
    order = -1 if few else 1
    modules, fast = [module_of(graph) for graph in graphs][::order], [timed.before, timed.after][::order]
    fakes = tuple(old.meta["val"] for old in values)
    call = editor.known(fakes, up_to(most, modules[0], modules[1], *rows), *inputs)
    call.meta["bound"] = up_to(most, fast[0], fast[1], *rows)
    call.meta[COMPUTES] = (most, *graphs[::order], *rows)
    call.meta["rowwise"] = all(map(keeps_rows, graphs))
    call.meta["fresh"] = all(map(makes_results, graphs))
    call.meta["calls"] = max(sum(map(calls_of, graph.nodes)) for graph in graphs)
    picked = {old: editor.known(old.meta["val"], operator.getitem, call, place) for place, old in enumerate(values)}
    return picked, f"{'up to' if few else 'above'} {most} rows: {verdict}"
