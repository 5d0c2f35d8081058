"""Front ends: from a module, an exported program or a Dynamo graph to the one IR (see `Capture`).

Importing this package imports sympy and torch's tracing machinery: do it when the first capture happens.
"""

from fxopt.capture.captured import Capture
from fxopt.capture.errors import Busy, CaptureError, OtherData, is_passing
from fxopt.capture.guards import Guards
from fxopt.capture.inputs import TensorSpec
from fxopt.capture.leaves import Leaf, LeafCall, LeafMismatch
from fxopt.capture.model import capture
from fxopt.capture.state import StateSlot

__all__ = [
    "Busy",
    "Capture",
    "CaptureError",
    "Guards",
    "Leaf",
    "LeafCall",
    "LeafMismatch",
    "OtherData",
    "StateSlot",
    "TensorSpec",
    "capture",
    "is_passing",
]
