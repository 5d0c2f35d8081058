"""The loader of AOTInductor's packages, which `fxopt.load` calls by its private name."""

from __future__ import annotations

from torch._C._aoti import AOTIModelPackageLoader
from torch.utils import _pytree as pytree


def test_the_loader_has_what_a_package_needs() -> None:
    for name in ("boxed_run", "get_call_spec", "get_metadata"):
        assert hasattr(AOTIModelPackageLoader, name), f"packages are opened in another way now: there is no {name}"


def test_a_spec_finds_its_leaves_whatever_the_order_of_keys() -> None:
    spec = pytree.treespec_loads(pytree.treespec_dumps(pytree.tree_structure(((1, {"a": 2, "b": 3}), {"c": 4}))))
    assert spec.flatten_up_to(((1, {"b": 3, "a": 2}), {"c": 4})) == [1, 2, 3, 4]
