"""All kernels of exported programs as one library to load, for processes without fxopt's Python.

`libfxopt.so` defines the operators, and opens the kernels' own libraries, which lie beside it. A kernel for a GPU is
opened by its first call on one (kernels/columns/cuda/bound.h).
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from fxopt.kernels import cuda_build
from fxopt.kernels.build import Library, build
from fxopt.kernels.columns import cuda
from fxopt.kernels.libraries import LIBRARIES
from fxopt.kernels.shims import Call
from fxopt.packages import FRONT, MANIFEST

PARTS = tuple(library for library in LIBRARIES if library.schemas)
_SOURCE = """#include <dlfcn.h>
#include <torch/library.h>

#include <cstdio>
#include <string>

static const char* const kSchemas[][2] = {{
{schemas}
}};
static const char* const kParts[] = {{{parts}}};

// What a Python process has defined already stays.
static void define() {{
  static torch::Library library(torch::Library::FRAGMENT, "fxopt", std::nullopt, __FILE__, __LINE__);
  for (const auto& [name, schema] : kSchemas)
    if (!c10::Dispatcher::singleton().findSchema({{std::string("fxopt::") + name, ""}})) library.def(schema);
}}

[[gnu::constructor]] static void open_parts() {{
  define();
  Dl_info own;
  if (!dladdr(reinterpret_cast<void*>(&open_parts), &own)) return;
  const std::string path = own.dli_fname, folder = path.substr(0, path.rfind('/') + 1);
  int opened = 0;
  std::string failed;
  for (const char* part : kParts) {{
    if (dlopen((folder + part).c_str(), RTLD_NOW | RTLD_GLOBAL)) opened++;
    else failed += std::string("fxopt: ") + dlerror() + "\\n";
  }}
  if (opened) fputs(failed.c_str(), stderr);  // none: it was only just compiled
}}
"""


def front(opens: Sequence[Library]) -> Library:
    """The library that opens the others."""
    calls = [Call(schema) for schema in _schemas(opens)]
    schemas = ",\n".join(f'    {{"{call.name}", "{call.schema}"}}' for call in calls)
    parts = ", ".join(f'"{part.name}.so"' for part in opens)
    text = _SOURCE.format(schemas=schemas, parts=parts)
    return Library("fxopt_front", (), ("-O1",), written=(("front.cpp", text),))


def write(folder: Path, archs: Sequence[str] = ()) -> list[Path]:
    """Builds the libraries and writes them to a folder, with a manifest. Returns the files.

    Args:
        archs: of GPUs that programs shall run on, as in "sm_90a".

    Raises:
        BuildError: a library cannot be compiled.
        OSError: the folder cannot be written.
    """
    opens = (*PARTS, *([cuda.WRAPPER] if archs else []))
    built = {FRONT: build(front(opens))} | {f"{part.name}.so": build(part) for part in opens}
    built |= {f"{cuda.KERNEL.name}-{arch}.so": cuda_build.build(cuda.KERNEL, arch) for arch in archs}
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in built.items():
        shutil.copyfile(path, folder / name)
    manifest = {
        "library": FRONT,
        "opens": {f"{part.name}.so": [Call(schema).name for schema in part.schemas] for part in opens},
        "archs": list(archs),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return [folder / name for name in (*built, MANIFEST)]


def _schemas(libraries: Sequence[Library]) -> Iterator[str]:
    return (schema for library in libraries for schema in library.schemas)
