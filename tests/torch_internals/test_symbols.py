"""What fxopt asks and tells the symbol table of torch about a size."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
import torch.fx.experimental.symbolic_shapes as symbolic_shapes
from torch import Tensor

from fxopt.torch_internals.patches import OBLIVIOUS
from fxopt.torch_internals.shape_env import TraceShapeEnv, questions
from fxopt.torch_internals.symbols import (
    environment_of,
    expression,
    free_symbols,
    free_unbacked_symbols,
    hint_of,
    hints_of,
    is_accessor_node,
    narrow,
    never_negative,
    range_of,
    recorded_term,
    statically_known_true,
    traced_sizes,
)
from fxopt.torch_internals.tracing import number_proxy


def item(environment: TraceShapeEnv) -> torch.SymInt:
    """A number that depends on data."""
    return environment.create_unbacked_symint()


def test_a_size_is_a_term(environment: TraceShapeEnv) -> None:
    size: Any = environment.size("x", 5, positive=False)
    assert expression(size).is_Symbol and expression(size * 3 + 1) == 3 * expression(size) + 1, (
        "SymInt.node.expr is no term of sympy: all of fxopt/shape computes with it"
    )
    assert hint_of(size) == 5 and dict(hints_of(size)) == {expression(size): 5}, (
        "node.hint or backed_var_to_val: fxopt/tune times a region at the sizes of the example"
    )
    assert traced_sizes([size, 3, environment.create_unbacked_symint()], unknown=7) == [5, 3, 7]
    assert environment_of(size) is environment, (
        "node.shape_env: fxopt/rewrites/framework/editor.py tells it what was proved"
    )
    assert free_symbols(size) == {expression(size)} and not free_unbacked_symbols(size), (
        "free_symbols: fxopt/lowering looks for hidden sizes with it"
    )
    assert statically_known_true(size >= 0) and not statically_known_true(size >= 1), (
        "a size of a capture is not known to be from 0 on: fxopt/shape/sizes.py proves with it"
    )
    assert not environment.guards, "asking about a size made a guard: the graph would serve fewer sizes"


def test_what_is_never_negative(environment: TraceShapeEnv) -> None:
    """torch.export says of a size that it is 2 or more, and takes 0 and 1 all the same."""
    size: Any = environment.size("x", 5, positive=True)
    found: Any = item(environment)
    assert all(map(never_negative, [size, 3 * size + 1, size // 2, (size + 3) // 4])), (
        "bound_sympy, or sympy's is_nonnegative of torch's terms: fxopt/torch_internals/exporting.py makes tensors of "
        "such sizes"
    )
    assert not any(map(never_negative, [size - 1, 3 - size, found, found + size]))
    narrow(found, 0, 100)
    assert never_negative(found) and not never_negative(found - size)


def test_the_range_of_a_size(environment: TraceShapeEnv) -> None:
    sizes = [expression(environment.size(str(positive), 5, positive)) for positive in (False, True)]
    assert [size.is_positive for size in sizes] == [None, True], (
        "create_symbol or var_to_range: a model that asks for an empty batch would get no guard"
    )
    number = item(environment)
    narrow(number, 2, 9)
    assert (range_of(number).lower, range_of(number).upper) == (2, 9), (
        "var_to_range no longer narrows a number: fxopt/capture/proofs.py bounds what .item() gives so"
    )


def test_what_was_learned_is_not_in_the_recorded_term(environment: TraceShapeEnv) -> None:
    number, size = item(environment), environment.size("x", 5, positive=False)
    assert free_unbacked_symbols(number) == {recorded_term(number)}, "fxopt/shape/conditions.py finds unknown sizes so"
    symbol = expression(number)
    environment.learn(symbol, expression(size))
    assert expression(number) == expression(size), (
        "_set_replacement no longer makes one size another: fxopt/rewrites/framework/editor.py learns proved sizes so"
    )
    assert recorded_term(number) == symbol, "node._expr: fxopt/capture/decided.py finds where a number is known first"


def test_a_condition_on_data_is_kept_and_not_believed(environment: TraceShapeEnv) -> None:
    number, size = item(environment), environment.size("x", 5, positive=False)
    torch._check(number == size)
    assert [*environment.decided] == [sympy.Eq(recorded_term(number), expression(size))], (
        "guard_or_defer_runtime_assert: what a fake operator takes for granted of data is no condition of the graph"
    )
    assert expression(number) != expression(size), (
        "_maybe_guard_rel: a size that depends on data became another one, with no check in front"
    )


def test_questions_about_strides_make_no_guard(environment: TraceShapeEnv) -> None:
    size = environment.size("x", 5, positive=False)
    environment.operator = torch.ops.aten.linear.default
    assert size > 3 and not environment.guards, "evaluate_expr: every capture would hold for a range of batches only"
    environment.operator = None
    assert size > 3 and len(environment.guards) == 1, "a question of the user's code made no guard"


def test_equal_products_are_equal_sizes(environment: TraceShapeEnv) -> None:
    a, b, c, d = (environment.size(name, hint, positive=False) for name, hint in zip("abcd", (5, 7, 5, 7), strict=True))
    assert a * b == d * c
    assert expression(a) == expression(c) and expression(b) == expression(d), (
        "evaluate_expr: a loss over [B, L] would have a capture for each length"
    )


def test_an_operator_that_asks_if_unknown_data_is_empty_goes_on(environment: TraceShapeEnv) -> None:
    number = item(environment)
    environment.operator = torch.ops.aten.logsumexp.default
    assert number != 0 and not environment.decided, "evaluate_expr: logsumexp(x[mask]) would keep a model eager"
    environment.operator = torch.ops.aten.amax.default
    with pytest.raises(symbolic_shapes.GuardOnDataDependentSymNode):
        bool(number == 0)


def test_what_is_asked_meanwhile_is_told(environment: TraceShapeEnv) -> None:
    size = environment.size("x", 5, positive=False)
    with questions(environment) as asked:
        assert size > 3
    assert len(asked) == 1 and not environment.guards, (
        "_check_frozen is not called before a guard is added: fxopt/rewrites would keep rewrites for some sizes only"
    )
    assert size > 3 and len(environment.guards) == 1, "the answer stayed in the cache, without its guard"


def test_what_is_asked_inside_is_told_inside_alone(environment: TraceShapeEnv) -> None:
    size = environment.size("x", 5, positive=False)
    with questions(environment) as outer:
        with questions(environment) as inner:
            assert size > 3
        assert len(inner) == 1 and not outer
        assert size > 4
    assert len(outer) == 1 and not environment.guards, "the inner questions took the place of the outer ones"


def test_the_node_of_a_size_is_an_accessor(tracer: Any, x: Tensor) -> None:
    node = number_proxy(x.shape[0], tracer).node
    assert is_accessor_node(node), "is_accessor_node: fxopt/capture/recorded.py would leave dead sizes in graphs"


def test_sizes_of_0_and_1_are_not_special(environment: TraceShapeEnv, fake_mode: Any) -> None:
    config, name, value = OBLIVIOUS
    with fake_mode, config.patch(**{name: value}):
        x = torch.empty(environment.size("x", 5, positive=False), 4)
        torch.cat([x, x]).sum(0)
    assert not environment.guards, f"{name} no longer keeps operators from asking about sizes of 0 and 1"


def test_a_guard_asks_for_no_line_of_the_user(environment: TraceShapeEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    def imports_torch_export() -> None:
        raise AssertionError("_get_user_frame is not asked: every first call imports torch.export, which takes 0.3 s")

    monkeypatch.setattr(symbolic_shapes, "uninteresting_files", imports_torch_export)
    size: Any = environment.size("x", 5, positive=False)
    assert size == 5 and environment.guards


def test_what_depends_on_data_is_said_without_a_line_of_the_user(environment: TraceShapeEnv) -> None:
    number: Any = item(environment)
    with pytest.raises(symbolic_shapes.GuardOnDataDependentSymNode):  # an AttributeError, up to torch 2.12
        bool(number == 5)


def test_a_number_of_a_size_is_told(environment: TraceShapeEnv, x: torch.Tensor) -> None:
    told: list[str] = []
    environment.on_number = lambda size: told.append(str(size))
    assert x.shape[0] > 1 and not told
    assert len(range(x.shape[0])) == 5 and told, "SymInt.__index__: a report no longer tells which line fixes a size"
