"""At least 2,000 random models: the optimized one is the eager one, at every size, forward and backward."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

from fxopt.config import Config
from fxopt.optimize import optimize
from tests.properties.compare import assert_same, outcome
from tests.properties.graphs import programs
from tests.properties.inputs import Sizes
from tests.properties.programs import Program

OTHERS = (Sizes(0, 2), Sizes(1, 1), Sizes(2, 0), Sizes(7, 6))
GRAPHS, PARTS = 2000, 2


def rewrites(model: nn.Module) -> int:
    """Calls of the columns operator in the one capture of an optimized model."""
    (entry,) = model._fxopt.entries  # type: ignore[union-attr, misc]
    assert entry.executable is not None, entry.findings.eager_reason
    return sum(len(ran.changes) for ran in entry.findings.passes if ran.name == "embedding_columns")


def check(program: Program, seen: Counter[str]) -> None:
    """Eager against optimized at the captured sizes and at two others; one capture serves all but an empty batch."""
    eager, model = program.model(), program.model()
    example = program.arguments(program.sizes, 0)
    try:
        with torch.set_grad_enabled(program.grad):
            fast = optimize(model, example, Config(verify="off", tune="off"))
    except RuntimeError as error:  # lengths that do not fit: the model's own error
        assert isinstance(outcome(eager, program.arguments(program.sizes, 0), program.grad).error, type(error))
        return
    seen["graphs"] += 1
    seen["optimized"] += rewrites(fast) > 0
    first = seen["graphs"] % len(OTHERS)
    others = sorted((OTHERS[first], OTHERS[first - 1]), key=lambda sizes: sizes.batch == 0)
    for seed, sizes in enumerate((program.sizes, *others)):
        if sizes.batch == 0:
            rewrites(fast)  # still the one capture
        arguments = program.arguments(sizes, seed)
        expected = outcome(eager, arguments, program.grad)
        assert_same(expected, outcome(fast, arguments, program.grad))
        seen["runs"] += 1
        seen["raised"] += expected.error is not None
    assert len(fast._fxopt.entries) <= 2  # type: ignore[union-attr, arg-type]


def check_models(seed: int, seen: Counter[str]) -> None:
    """A part of the random models, on one core."""

    @hypothesis.seed(seed)
    @settings(max_examples=GRAPHS // PARTS, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(programs())
    def run(program: Program) -> None:
        check(program, seen)

    torch.set_num_threads(1)
    run()


def start() -> subprocess.Popen[str]:
    """All random models, in a process of its own: models this small leave a second core idle."""
    command = [sys.executable, "-m", "tests.properties.test_columns"]
    root = Path(__file__).parents[2]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_random_models(random_models: subprocess.Popen[str] | None) -> None:
    with random_models or start() as process:
        found, failure = process.communicate()
    assert process.returncode == 0, failure
    seen = Counter(json.loads(found))
    assert seen["graphs"] > 0.99 * GRAPHS
    assert seen["optimized"] > 0.9 * seen["graphs"], seen
    assert seen["raised"] < 0.3 * seen["runs"], seen


if __name__ == "__main__":
    counted: Counter[str] = Counter()
    for part in range(PARTS):
        check_models(part, counted)
    print(json.dumps(counted))
