"""Checks in Python code, `assert ids.max() < n` and `if bad.any(): raise ...`: the answer that raises nothing."""

from __future__ import annotations

import dis
import functools
from types import CodeType, FrameType

_STEPS_TO_RAISE = 60  # a message of many parts takes 40


def harmless_answer(frame: FrameType) -> bool | None:
    """What a frame that asks for the truth of a value must be told so that it goes on, where the other answer leads
    straight to a `raise`; None where neither does, or both do."""
    return _harmless_answer(frame.f_code, frame.f_lasti)


@functools.lru_cache(1024)
def _harmless_answer(code: CodeType, at: int) -> bool | None:
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("NOT_TAKEN", "CACHE", "NOP")]
    place_of = {step.offset: place for place, step in enumerate(steps)}
    if at not in place_of:
        return None
    harmless = [answer for answer in (True, False) if not _raises(steps, place_of, place_of[at], answer)]
    return harmless[0] if len(harmless) == 1 else None


def _raises(steps: list[dis.Instruction], place_of: dict[int, int], place: int, answer: bool) -> bool:
    """Whether the code behind the question at `place` raises, if the answer is this one, before it asks another."""
    asking = True
    for _ in range(_STEPS_TO_RAISE):
        if place >= len(steps):
            return False
        step = steps[place]
        place += 1
        if step.opname == "RAISE_VARARGS":
            return not asking
        if asking and step.opname == "UNARY_NOT":
            answer = not answer
        elif asking and step.opname.startswith("POP_JUMP") and step.opname.endswith(("IF_TRUE", "IF_FALSE")):
            asking = False
            if answer == step.opname.endswith("IF_TRUE"):
                place = _target(step, place_of)
        elif asking and step.opname != "TO_BOOL":
            return False
        elif step.opname.startswith("JUMP_FORWARD") or step.opname == "JUMP_ABSOLUTE":
            place = _target(step, place_of)
        elif step.opcode in dis.hasjrel or step.opcode in dis.hasjabs or step.opname.startswith(("RETURN", "YIELD")):
            return False
    return False


def _target(step: dis.Instruction, place_of: dict[int, int]) -> int:
    """The place of the instruction that a jump leads to; those that do nothing are left out."""
    return min(place for offset, place in place_of.items() if offset >= step.argval)
