"""Where Python keeps a fact and how code reaches it there: text that fragments are put together from.

In each text, $V is a value, $H what holds it, $x the input, and $i the number of the part. A fact is read in `forward`,
where the model is `self`, and changed by a user who calls it `m`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A root or a link of the chain that leads to a fact.

    Args:
        make: an expression that holds $V; of a root, the statement in `__init__` that stores it.
        read: an expression for what $H holds; of a root, one that needs no $H.
        puts: statements that let it hold another $V from now on.
        top: definitions in the module. body: those in the model's class.
        number: whether only numbers can be held.
    """

    make: str
    read: str
    puts: tuple[str, ...] = ()
    top: str = ""
    body: str = ""
    number: bool = False
