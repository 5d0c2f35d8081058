"""The C++ checks and the Python ones answer alike."""

from __future__ import annotations

import random
import types

import pytest
import torch
from torch import nn

from fxopt.runtime.checks import (
    PythonTensorCheck,
    TensorForm,
    generation_reader,
    python_lengths,
    python_read,
    python_unchanged,
    tensor_check,
)
from fxopt.runtime.native import native

needs_native = pytest.mark.skipif(native() is None, reason="no C++ compiler")
CPU, META = torch.device("cpu"), torch.device("meta")
POOL = [
    torch.zeros(2, 3),
    torch.zeros(3, 3),
    torch.zeros(3, 2),
    nn.Parameter(torch.zeros(2, 3)),
    torch.zeros(2, 3, dtype=torch.float64),
    torch.zeros(2, 3, device=META),
    torch.zeros(2, 3).to_sparse(),
    torch.zeros(3, 2).t(),
    torch.zeros(()),
    torch.zeros(0),
    torch.zeros(2),
    type("Sub", (torch.Tensor,), {})(),
    "not a tensor",
    None,
]
FORMS = [
    TensorForm(torch.float32, CPU, (2, 3)),
    TensorForm(torch.float32, CPU, ("a", 3)),
    TensorForm(torch.float32, CPU, ("a", "b")),
    TensorForm(torch.float32, CPU, ("b", "a")),
    TensorForm(torch.float64, CPU, ("a", 3)),
    TensorForm(torch.float32, META, (2, "c")),
    TensorForm(torch.float32, CPU, ("b",)),
    TensorForm(torch.float32, CPU, ()),
]


@needs_native
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_tensor_checks_agree(count):
    rng = random.Random(count)
    answers = set()
    for _ in range(2000 if count else 1):
        forms = rng.choices(FORMS, k=count)
        tensors = rng.choices(POOL, k=count if rng.random() < 0.95 else count + 1)
        fast, plain = tensor_check(forms)(tensors), PythonTensorCheck(forms)(tensors)
        assert fast is plain, (forms, tensors)
        assert tensor_check(forms)(tuple(tensors)) is fast
        answers.add(fast)
    assert True in answers and (count == 0 or False in answers)


@needs_native
def test_dict_reads_agree():
    module = native()
    value = object()
    where = {"a": value, "b": 1}
    proxy = types.MappingProxyType(where)
    cases = [
        ([where, where], ["a", "b"]),
        ([where, proxy], ["b", "a"]),
        ([where, proxy], ["a", "missing"]),
        ([where], ["missing"]),
        ([], []),
    ]
    for wheres, keys in cases:
        seen = module.Seen()
        for _ in range(2):  # the second time by what was seen
            now = module.read(seen, wheres, keys)
        assert now == python_read(wheres, keys)
        for values in ([value, 1], [1, value], [value], [], [None] * len(keys)):
            if len(values) == len(keys):
                assert module.unchanged(wheres, keys, values) is python_unchanged(wheres, keys, values)
    with pytest.raises(ValueError, match="one length"):
        module.read(module.Seen(), [where], [])
    with pytest.raises(TypeError):
        module.read(None, [where], ["a"])
    with pytest.raises(TypeError):
        module.unchanged([where], ["a"], (value,))
    with pytest.raises(TypeError):
        tensor_check(FORMS[:1])(iter(POOL))


@needs_native
def test_the_generation_of_dicts_differs_after_every_change():
    changes = [
        lambda d: d.update(a=2),
        lambda d: d.pop("b"),
        lambda d: d.update(c=3),
        lambda d: setattr(Held, "x", 1),
        lambda d: held.__dict__.update(y=1),
        lambda d: setattr(held, "y", 2),
        lambda d: delattr(held, "y"),
    ]
    Held = type("Held", (), {})
    held, where = Held(), {"a": 1, "b": 2}
    dicts = [where, vars(Held), vars(held), {}]
    generation = generation_reader()
    seen = generation(dicts)
    if seen is None:
        pytest.skip("this Python does not number the changes of dicts")
    assert generation(dicts) == seen
    for change in changes:
        change(where)
        assert generation(dicts) != seen
        seen = generation(dicts)
        assert generation(dicts) == seen
    assert generation([{}, []]) is None
    assert generation([types.MappingProxyType(type("Own", (dict,), {})())]) is None


@needs_native
def test_lengths_agree():
    containers = [{}, {"a": 1}, [1, 2, 3], {4}]
    for expected in ([0, 1, 3, 1], [0, 1, 3, 2], [1, 1, 3, 1], [0, dict, 3, set], [0, dict, 3, dict]):
        assert native().lengths(containers, expected) is python_lengths(containers, expected)
    with pytest.raises(ValueError, match="one length"):
        native().lengths(containers, [])
    with pytest.raises(TypeError):
        native().lengths([3], [1])


@needs_native
def test_dicts_are_read_far_ahead_and_at_the_end():
    """The prefetches look up to 16 dicts ahead: shared keys, own keys, and nothing beyond the list."""
    objects = [type("Module", (), {})() for _ in range(50)]
    for number, item in enumerate(objects):
        item.number = number
    wheres = [vars(item) if number % 3 else {"number": number} for number, item in enumerate(objects)]
    for n in (1, 7, 8, 9, 15, 16, 17, 50):
        seen = native().Seen()
        for _ in range(2):
            assert native().read(seen, wheres[:n], ["number"] * n) == list(range(n))


@needs_native
def test_reads_follow_every_change():
    """A value that was seen counts as long as nothing changed: replaced, deleted, gone and come back, another dict."""
    kept = {"a": object(), "b": object()}
    wheres, keys, seen = [kept, types.MappingProxyType(kept), [kept["a"]]], ["a", "b", 0], native().Seen()
    for change in (
        lambda: None,
        lambda: kept.update(a=object()),
        lambda: kept.pop("b"),
        lambda: kept.update(b=object()),
        lambda: wheres[2].append(wheres[2].pop()),
        lambda: wheres[2].__setitem__(0, object()),
        lambda: wheres.__setitem__(0, {"a": object()}),
        lambda: kept.clear(),
    ):
        change()
        for _ in range(2):
            assert native().read(seen, wheres, keys) == python_read(wheres, keys)


@needs_native
def test_broken_arguments_are_errors_not_crashes():
    check = native().TensorCheck
    with pytest.raises(TypeError):
        check([1], [[1]], 0)
    with pytest.raises(ValueError, match="symbols"):
        check([torch.empty(0)], [[-3]], 2)
    with pytest.raises(TypeError):
        check([torch.empty(0)], [["x"]], 0)


def test_the_model_works_without_a_compiler(monkeypatch):
    from fxopt.runtime import checks
    from tests.runtime.models import Tower, assert_same, optimize, tower_inputs

    monkeypatch.setattr(checks, "native", lambda: None)
    model = Tower().eval()
    fast, recorder = optimize(model)
    for batch in (4, 0, 1):
        inputs = tower_inputs(batch)
        assert_same(fast(*inputs), model(*inputs))
    model.double()
    fast(inputs[0].double(), inputs[1])
    assert recorder.captures == 2
