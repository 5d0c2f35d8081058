"""When a replacement that is right is applied."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """What has to be known of a replacement's speed before it is applied; by default nothing.

    measured: timed on this machine, and left out at the batch sizes where it loses; applied where no time was left.
    rows: batch sizes to time it at, where the usual ones would say nothing; left out where it gains at none of them.
    proof: left alone where nothing could be timed or nothing is gained, because no device is known on which it wins.
    everywhere: left alone where it loses at some batch size; else one of the two is picked at each call.
    """

    measured: bool = False
    rows: tuple[int, ...] = ()
    proof: bool = False
    everywhere: bool = False


ALWAYS = Policy()
MEASURED = Policy(measured=True)
PROVEN = Policy(measured=True, proof=True)
