"""Input signatures as a person reads them."""

from __future__ import annotations

import re
from collections import Counter


def inputs(signature: str) -> str:
    """Inputs of one form once, with their number: 1000 columns have 1020 inputs. "f32[B, 13], 26 x i64[B]; eval".

    B is the size that most inputs share; others have letters, or * where they are many.
    """
    forms, semicolon, rest = in_letters(signature, signature).partition(";")
    counts = Counter(re.findall(r"[^,\[\s]+(?:\[[^\]]*\])?", forms))
    return ", ".join(f"{n:,} x {form}" if n > 1 else form for form, n in counts.items()) + semicolon + rest


def in_letters(text: str, signature: str) -> str:
    """`text` with B for the size that most inputs of the signature share, and letters for a few others.

    Where they are many, they are * in the signature.
    """
    counts = Counter(re.findall(r"\bs\d+\b", signature))
    ordered = [symbol for symbol, _ in counts.most_common()]
    letters = dict(zip(ordered, "BLMNKPQ" if len(ordered) <= 7 else "B", strict=False))
    return re.sub(r"\bs\d+\b", lambda found: letters.get(found[0], "*" if text is signature else found[0]), text)
