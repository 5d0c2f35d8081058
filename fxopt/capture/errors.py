"""Why a model, or a part of it, cannot become a graph."""

from __future__ import annotations

from fxopt.findings import Place

_UNKNOWN = Place()


class CaptureError(RuntimeError):
    """The model stays eager. `reason` is for the user; `place` names the module and source line that stopped it."""

    def __init__(self, reason: str, place: Place = _UNKNOWN):
        super().__init__(f"{place}: {reason}")
        self.reason = reason
        self.place = place
