"""A last look at the whole: rewrites that made a graph slower than it was captured are left out.

A trial of a rewrite sees its region alone, some rewrites have none, and launches that fill a device together may not
do so apart. The inputs are those of the capture: made-up ids could be wrong ones, which no process on CUDA survives.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from fxopt import rewrites, trees
from fxopt.capture import Capture
from fxopt.config import Config
from fxopt.findings import Miss, PassFindings, Place
from fxopt.normalize import records_nothing
from fxopt.runtime.executable import Executable, has_own_backward
from fxopt.shape.aliases import Aliases, leaves_a_trace, written_arguments
from fxopt.tune.clock import all_captured, fastest, on_device_of
from fxopt.tune.tuner import Tuner, Verdict
from fxopt.verify.resized import batch_of, resized
from fxopt.verify.trial import undisturbed

_SURE = 1.2  # a win in a single look that needs no other
_LONG = 0.5  # seconds; longer runs are not repeated
_MOST_ROWS = 256  # that are made up; an example with more stands for itself
_SMALL = 64 << 20  # bytes of parameters that are trained: a step of the race makes their dense gradients, as eager does


def takes_turns(executable: Executable, config: Config, tuner: Tuner) -> bool:
    """Whether calls themselves have to tell if it pays, and nobody waits for a device at the end of one."""
    return bool(executable.capture.leaves) and _we_choose(config, tuner) and not _on_cuda(executable)


def may_be_raced(executable: Executable, config: Config, tuner: Tuner) -> bool:
    """Something changed, the user lets us choose, and a call leaves nothing behind.

    Of calls that record gradients those of small models on the CPU: Python may take more of a step than kernels save.
    """
    captured, graph = executable.capture, executable.graph
    effects = captured.leaves or graph is None or _can_be_seen(graph)
    raced = _we_choose(config, tuner) and not effects
    return raced and bool(_changed(executable)) and _records_little(captured.graph.graph)


def _we_choose(config: Config, tuner: Tuner) -> bool:
    return tuner.effort.seconds > 0 and config.verify != "off" and config.max_rewrites is None


def _can_be_seen(module: GraphModule) -> bool:
    """Whether a call leaves a trace outside: one in memory of its own, as `zeros_like(x).normal_()`, is none, and what
    is called for the sake of its backward edits nothing."""
    traces = [node for node in module.graph.nodes if leaves_a_trace(node) and not has_own_backward(node, module)]
    aliases = Aliases(module.graph if traces else None)
    for written in map(written_arguments, traces):
        if not written or any(other.op != "call_function" for each in written for other in aliases.sharing(each)):
            return True
    return False


def _records_little(graph: Graph) -> bool:
    if records_nothing(graph):
        return True
    given = {node: node.meta.get("val") for node in graph.find_nodes(op="placeholder")}
    tensors = {node: value for node, value in given.items() if isinstance(value, Tensor)}
    on_cpu = all(value.device.type == "cpu" for value in tensors.values())
    return on_cpu and sum(value.nbytes for node, value in tensors.items() if "state" in node.meta) <= _SMALL


def slower_passes(executable: Executable, race: Race, without: Callable[[list[str]], Executable]) -> list[PassFindings]:
    """The passes to leave out, each with a miss that says why; mostly none.

    It is slower where it loses on the inputs of the capture, wins at none of the tuner's batch sizes, and does so again
    when all are timed once more. Then the passes are left out one by one; all of them, where that helps nowhere.

    Args:
        without: compiles the capture with the passes of these names left out.
    """
    names = _changed(executable)
    try:
        with undisturbed(race.model):
            verdict = race.verdict(executable.run)
            if not verdict.slower or not race.verdict(executable.run).slower:
                return []
            guilty, ratio = _one_of(names, without, race)
    except Exception:  # the example is an error in eager, or there is no memory for it: nothing is known
        return []
    if guilty:
        return [_left_out(guilty, f"{verdict}; without this pass {ratio:.2f}x")]
    return [_left_out(name, f"{verdict}; no single pass was to blame, so all are left out") for name in names]


def _changed(executable: Executable) -> list[str]:
    """The passes that may be left out."""
    on_cuda = _on_cuda(executable)
    stay = {"normalize"}.union(each.name for each in rewrites.PASSES if on_cuda and each.safer_on_cuda)
    return [ran.name for ran in executable.findings.passes if ran.changes and ran.name not in stay]


def _on_cuda(executable: Executable) -> bool:
    values = (node.meta.get("val") for node in executable.capture.graph.graph.nodes)
    return any(isinstance(value, Tensor) and value.is_cuda for value in values)


def _left_out(name: str, ratios: str) -> PassFindings:
    reason = (
        f"left out, the whole graph was slower than as it was captured: {ratios}. "
        f"Config(disable=('{name}',)) leaves it out untimed, Config(tune='off') keeps it"
    )
    return PassFindings(name, misses=[Miss(name, reason, Place())])


def _one_of(names: Sequence[str], without: Callable[[list[str]], Executable], race: Race) -> tuple[str, float]:
    """The pass without which the rest is as fast as what was captured, and how fast; "" where there is none."""
    best = ("", 1.0)
    for name in names if len(names) > 1 else ():
        if race.is_over:
            break
        ratio = race.ratio(without([name]).run, race.inputs)
        best = max(best, (name, ratio), key=lambda found: found[1])
    return best


@dataclass(frozen=True)
class Race:
    """A captured graph, ``before(*state, *inputs)``, against what was made of it, on the example and its rows.

    On a GPU both are replayed; unless we are who replays them, what is slower there and faster when called is faster.
    """

    captured: Capture
    model: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    before: Callable[..., object]
    tuner: Tuner
    replayed: bool
    training: bool = False  # backward is timed as well
    started: float = field(default_factory=time.perf_counter)

    @property
    def is_over(self) -> bool:
        """Whether it has taken as long as all trials of a capture may take."""
        return time.perf_counter() > self.started + self.tuner.effort.seconds

    @property
    def inputs(self) -> list[Tensor]:
        return [leaf for leaf in trees.leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def verdict(self, after: Callable[..., object]) -> Verdict:
        """Up to the first batch size at which there is nothing to take back; the first is that of the inputs."""
        ratios: dict[int, float] = {}
        for rows, inputs in self._sizes():
            ratios[rows] = self.ratio(after, inputs)
            if self.is_over or not Verdict(ratios).slower:
                break
        return Verdict(ratios)

    def ratio(self, after: Callable[..., object], inputs: Sequence[Tensor]) -> float:
        tensors = [*self.captured.state_of(self.model), *inputs]
        if self.training:  # on leaves of their own, so that no hook of the user's runs
            own = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            leaves = [tensor for tensor in own if tensor.requires_grad]
            return self._timed([functools.partial(_step, run, leaves, {}, *own) for run in (self.before, after)])
        runs: list[Callable[[], object]] = [functools.partial(run, *tensors) for run in (self.before, after)]
        with torch.no_grad(), on_device_of(tensors):
            if not any(tensor.is_cuda for tensor in tensors):
                return self._timed(runs)
            ratio = self._timed(all_captured(runs))
            if ratio >= 1 or self.replayed:
                return ratio
            called = self._timed(runs)
        return called if Verdict({1: called}).faster else ratio

    def _timed(self, runs: Sequence[Callable[[], object]]) -> float:
        old, new = fastest(runs, 0.0, fewest=1, most=1)
        if old < min(_SURE * new, _LONG):
            old, new = self.tuner.seconds(runs)
        return old / new

    def _sizes(self) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Numbers of rows, and inputs of so many that the graph holds for."""
        own = batch_of(self.inputs)
        yield own, self.inputs
        for rows in self.tuner.effort.rows:
            if rows == own or rows > max(own, _MOST_ROWS):
                continue
            inputs = resized(self.captured.graph, self.captured.state_of(self.model), self.inputs, rows)
            if inputs is not None and self.captured.guards.holds(inputs):
                yield rows, inputs


def _step(
    run: Callable[..., Any], leaves: Sequence[Tensor], grads: dict[torch.Size, Tensor], *tensors: Tensor
) -> object:
    """A call and its backward. grads: of its results, by their shapes, as the first call leaves them."""
    with torch.enable_grad():
        results = [y for y in run(*tensors) if isinstance(y, Tensor) and y.requires_grad]
    given = [grads.setdefault(y.shape, y.detach().clone()) for y in results]
    return torch.autograd.grad(results, leaves, given, allow_unused=True)
