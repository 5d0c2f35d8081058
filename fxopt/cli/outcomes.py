"""How a command ends that did its work and found something wrong."""

from __future__ import annotations

FAILED, MISSED = 1, 3


class Ended(Exception):
    """The exit code, and a line for stderr ("" where all is said)."""

    def __init__(self, code: int, message: str = "") -> None:
        super().__init__(message)
        self.code = code
