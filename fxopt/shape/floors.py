"""Which terms about sizes are never negative, among them those about how many times a number is in a size."""

from __future__ import annotations

import sympy
from torch.utils._sympy.functions import FloorDiv


def never_negative(term: sympy.Expr) -> bool:
    """Whether a term about sizes, which are not negative, is not; False may just mean "not known".

    With s = 3 * q + r and s // 3 = q, the term s - 2 * (s // 3) is q + r.
    """
    known: dict[sympy.Basic, sympy.Basic] = {}
    for floor in sorted(term.atoms(FloorDiv), key=str):
        whole, part = floor.args
        if whole.is_Symbol and part.is_Integer and part > 0 and whole not in known:
            quotient, rest = sympy.Dummy("quotient"), sympy.Dummy("rest")
            known |= {floor: quotient, whole: part * quotient + rest}
    plain = sympy.expand(term.xreplace(known))
    sizes = all(
        factor.is_Symbol or factor.is_Integer
        for part in sympy.Add.make_args(plain)
        for factor in sympy.Mul.make_args(part)
    )
    return sizes and all(factor >= 0 for factor in plain.as_coefficients_dict().values())


def divisions_in(term: sympy.Basic) -> list[tuple[sympy.Expr, int]]:
    """What it divides by a number, rounding down, and the number."""
    divisions = (floor.args for floor in term.atoms(FloorDiv))
    return [(divided, int(by)) for divided, by in divisions if by.is_Integer]
