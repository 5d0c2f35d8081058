"""How torch enters a kernel from C++: a function for its dispatcher and one for AOTInductor, written from the schema.

AOTInductor calls a "C shim" directly: a function `aoti_torch_cpu_NAME` that takes the arguments in C, a list as its
address and length. It skips the dispatcher, which boxes every tensor. Both functions ask a library's
`fxopt_NAME_run(const Request*)`: tensors are its operands, and numbers, alone or many in a text, the words of its plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fxopt.torch_internals.operators import parse_schema

_SUFFIX = "_kernel"  # of an operator that is a kernel alone, beside one that chooses between it and PyTorch


class _Kind(NamedTuple):
    """How an argument of a type is written. cpp: for the dispatcher; c: for AOTInductor; method: of shims.h's CCall."""

    cpp: str
    c: tuple[str, ...]
    method: str


_TENSOR = "Tensor"
_KINDS = {
    _TENSOR: _Kind("Tensor", ("AtenTensorHandle {}",), "tensor"),
    "Optional[Tensor]": _Kind("std::optional<Tensor>", ("const AtenTensorHandle* {}",), "optional"),
    "List[Tensor]": _Kind("std::vector<Tensor>", ("const AtenTensorHandle* {}", "int64_t n_{}"), "tensors"),
    "List[Optional[Tensor]]": _Kind(
        "std::vector<std::optional<Tensor>>", ("const AtenTensorHandle* const* {}", "int64_t n_{}"), "optionals"
    ),
    "int": _Kind("int64_t", ("int64_t {}",), "number"),
    "bool": _Kind("bool", ("int32_t {}",), "number"),
    "float": _Kind("double", ("double {}",), "number"),
    "List[int]": _Kind("std::vector<int64_t>", ("const int64_t* {}", "int64_t n_{}"), "numbers"),
    "str": _Kind("std::string", ("const char* {}",), "number"),
}
_PLAN = _Kind("", _KINDS[_TENSOR].c, "plan")  # a tensor whose numbers are the plan, where it is the last argument


class Call:
    """The C++ of one operator.

    Args:
        schema: as of torch.library.define; it may have no other types than `_KINDS` has.
    """

    def __init__(self, schema: str) -> None:
        self.schema = schema
        parsed = parse_schema(f"fxopt::{schema}")
        self.name = parsed.name.removeprefix("fxopt::")
        self.run = f"fxopt_{self.name.removesuffix(_SUFFIX)}_run"
        types = {each.name: str(each.real_type) for each in parsed.arguments}
        self._checks_plan = types.get("plan") == _TENSOR  # so it has a dispatched function of its own
        self._arguments = [(name, _KINDS[type]) for name, type in types.items()]
        if self._checks_plan and parsed.arguments[-1].name == "plan":
            self._arguments[-1] = ("plan", _PLAN)
        self._returns = [str(returned.real_type) for returned in parsed.returns]

    def shim(self, device: str) -> str:
        """The declaration of what AOTInductor calls on a type of device; behind the arguments come the addresses of all
        results."""
        parameters = [text.format(name) for name, kind in self._arguments for text in kind.c]
        return f"AOTITorchError aoti_torch_{device}_{self.name}({', '.join(parameters)}, ...)"

    def source(self) -> str:
        """The definitions of both functions, and the registration of the first one."""
        dispatched = [] if self._checks_plan else self._dispatched()
        return "\n".join([f'extern "C" void {self.run}(const fxopt::Request*);', *dispatched, *self._shim()])

    def _dispatched(self) -> list[str]:
        parameters = ", ".join(f"const {kind.cpp} {name}" for name, kind in self._arguments)
        words = [name for name, kind in self._arguments if kind.method.startswith("number")]
        tensors = [name for name, _ in self._arguments if name not in words]
        run = f"fxopt::run_dispatched({self.run}, fxopt::words_of({', '.join(words)}), {', '.join(tensors)})"
        if self._returns == ["List[Tensor]"]:
            kind, value = "std::vector<Tensor>", run
        elif len(self._returns) == 1:
            kind, value = "Tensor", f"{run}[0]"
        else:
            kind = f"std::tuple<{', '.join(['Tensor'] * len(self._returns))}>"
            value = f"fxopt::as_tuple<{len(self._returns)}>({run})"
        return [
            f"static {kind} {self.name}({parameters}) {{ return {value}; }}",
            f'STABLE_TORCH_LIBRARY_IMPL(fxopt, CPU, m) {{ m.impl("{self.name}", TORCH_BOX(&{self.name})); }}',
        ]

    def _shim(self) -> list[str]:
        last = self._arguments[-1][1].c[-1].format(self._arguments[-1][0]).split()[-1]
        added = [
            f"  call.{kind.method}({', '.join(text.format(name).split()[-1] for text in kind.c)});"
            for name, kind in self._arguments
        ]
        return [
            f"FXOPT_EXPORT {self.shim('cpu')} {{",
            "  fxopt::CCall call;",
            *added,
            f"  call.run({self.run});",
            "  va_list results;",
            f"  va_start(results, {last});",
            "  call.give(results);",
            "  va_end(results);",
            "  return AOTI_TORCH_SUCCESS;",
            "}",
        ]


def sources(schemas: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The source of some operators of one library, for :class:`.build.Library`: (file name, text)."""
    calls = [Call(schema).source() for schema in schemas]
    text = "\n".join(['#include "shims.h"', "using torch::stable::Tensor;", *calls, ""])
    return (("shims.cpp", text),) if schemas else ()
