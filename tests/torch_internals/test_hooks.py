from __future__ import annotations

import copy

from torch import nn

from fxopt.torch_internals.hooks import COMPILED, HOOKS, has_hooks


def test_every_kind_of_hook_is_seen():
    def hook(*args):
        pass

    assert set(HOOKS) <= vars(nn.Module()).keys(), "torch keeps hooks under other names"
    kinds = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
    for kind in kinds:
        module = nn.Identity()
        assert not has_hooks(module)
        getattr(module, f"register_{kind}")(hook)
        assert has_hooks(module), kind


def test_what_compile_makes_is_kept_where_a_copy_has_none():
    module = nn.Identity()
    assert COMPILED in vars(nn.Module) and getattr(module, COMPILED) is None
    module.compile(backend="eager")
    assert vars(module)[COMPILED] is not None, "Module.compile() keeps what it made under another name"
    assert COMPILED not in vars(copy.deepcopy(module))
