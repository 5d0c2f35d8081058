"""Every attack, with the checks of fxopt on and off, captured at its first call and ahead of it."""

from __future__ import annotations

import pytest

from tests.attacks import boundaries, gradients, python_facts, seen_code, sizes, state
from tests.attacks.attack import CONFIGS, Attack

FAMILIES: dict[str, dict[str, Attack]] = {
    "data_dependent_sizes": sizes.DATA_DEPENDENT,
    "one_row": sizes.ONE_ROW,
    "coinciding_sizes": sizes.COINCIDING,
    "state_written_once": state.ONCE,
    "barriers": state.BARRIERS,
    "before_failures": state.BEFORE_FAILURES,
    "leaf_boundaries": boundaries.BOUNDARIES,
    "python_facts": python_facts.PYTHON_FACTS,
    "seen_code": seen_code.SEEN_CODE,
    "seen_values": seen_code.SEEN_VALUES,
    "bounds": gradients.BOUNDS,
    "empty": gradients.EMPTY,
    "outputs": gradients.OUTPUTS,
}
STATEFUL = ("state_written_once", "barriers", "before_failures", "leaf_boundaries", "python_facts")
CASES = [
    pytest.param(attack, id=f"{family}-{name}")
    for family, attacks in FAMILIES.items()
    for name, attack in attacks.items()
]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("attack", CASES)
def test_attack(attack: Attack, config) -> None:
    attack.check(config)


@pytest.mark.parametrize("attack", [case for case in CASES if case.id.split("-")[0] in STATEFUL])
def test_capture_ahead(attack: Attack) -> None:
    attack.check(CONFIGS["unchecked"], prepared=True)


def test_every_family_has_ten() -> None:
    assert all(len(attacks) >= 10 for attacks in FAMILIES.values()), {f: len(a) for f, a in FAMILIES.items()}
