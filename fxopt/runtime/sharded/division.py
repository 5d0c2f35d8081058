"""A module tree around what communicates in it, and stand-ins of the modules that hold such.

Hosts are the modules that hold a communicating module: their Python runs as it is. Boundaries are the communicating
modules. Parts are the outermost modules that hold none: they can be captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from fxopt.config import Config
from fxopt.reach.held import slots_of
from fxopt.runtime.pieces import CONTAINERS, give_back
from fxopt.runtime.sharded.communication import communicating
from fxopt.torch_internals.hooks import HOOKS


@dataclass
class Division:
    """By path; a module that has several paths is there by each of them.

    Attributes:
        boundaries: with the reason why each runs as it is.
        special: why a host cannot have a stand-in, by its path; what is in it runs as it is.
    """

    root: nn.Module
    hosts: dict[str, nn.Module] = field(default_factory=dict)
    boundaries: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    parts: dict[str, nn.Module] = field(default_factory=dict)
    special: dict[str, str] = field(default_factory=dict)

    @property
    def inner(self) -> frozenset[str]:
        """The paths at which the hosts end."""
        return frozenset((*self.boundaries, *self.parts))

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Parts and boundaries by path."""
        return {**self.parts, **{path: module for path, (module, _) in self.boundaries.items()}}


def divide(root: nn.Module, config: Config) -> Division:
    """The division of a tree; it has no boundaries where nothing communicates."""
    reasons = communicating(root)
    if reasons:
        named = {path: module for path, module in root.named_modules() if path in config.leaves}
        reasons.update((module, "is named in Config.leaves") for module in named.values())
    return divided(root, reasons)


def divided(root: nn.Module, reasons: Mapping[nn.Module, str]) -> Division:
    """The division of a tree at these modules, each with the reason why it is a boundary."""
    division = Division(root)
    if root in reasons:
        division.boundaries[""] = (root, reasons[root])
    elif reasons:
        _walk(division, reasons, "", root)
    return division


def _walk(division: Division, reasons: Mapping[nn.Module, str], path: str, host: nn.Module) -> None:
    division.hosts[path] = host
    hooked = bool(path) and any(vars(host).get(name) for name in HOOKS)
    if hooked or set(slots_of(type(host))) - {"_fxopt"}:
        division.special[path] = "has forward or backward hooks" if hooked else "has __slots__"
    for name, child in host._modules.items():
        inner = f"{path}.{name}".lstrip(".")
        if child is None:
            continue
        if child in reasons:
            division.boundaries[inner] = (child, reasons[child])
        elif isinstance(child, CONTAINERS) or any(module in reasons for module in child.modules()):
            _walk(division, reasons, inner, child)
        else:
            division.parts[inner] = child


class StandIn:
    """A module like the root whose hosts are copies, with other modules at some paths.

    The hosts' attributes are theirs until `give_back`; parameters, buffers and hooks are shared.
    """

    def __init__(self, division: Division, others: Mapping[str, nn.Module]) -> None:
        self._made: dict[nn.Module, nn.Module] = {}
        self._division, self._others = division, others
        self.root = self._of("", division.root)

    def give_back(self) -> None:
        """What was assigned to the copies is assigned to the hosts."""
        for host, copy in self._made.items():
            give_back(host, copy)

    @property
    def hosts(self) -> list[tuple[nn.Module, nn.Module]]:
        """Each host and its copy."""
        return list(self._made.items())

    def _of(self, path: str, module: nn.Module) -> nn.Module:
        if path in self._others:
            return self._others[path]
        if path not in self._division.hosts or path in self._division.special:
            return module
        if module not in self._made:
            self._made[module] = copy = object.__new__(type(module))
            inside = {
                name: child and self._of(f"{path}.{name}".lstrip("."), child) for name, child in module._modules.items()
            }
            copy.__dict__.update(vars(module), _modules=inside)
        return self._made[module]
