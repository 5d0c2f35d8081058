"""compute-sanitizer over every CUDA kernel of ours: `python -m tests.cuda.sanitize`, on a machine with a GPU.

What runs under each tool are tests that call a kernel by itself, so that its answers are checked too. PyTorch's caching
allocator is off: a tensor is memory of its own with a margin behind it, and a load beside it is seen. `--planted` runs
kernels with a bug each instead, which the tools must report.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from fxopt.kernels.cuda_build import nvcc

ROOT = Path(__file__).resolve().parents[2]
# Each kernel of fxopt/, and the test that launches it.
KERNELS = {
    "columns_kernel": "test_columns_gpu.py::test_kernel_equals_reference",
    "block_columns_kernel": "test_columns_gpu.py::test_bags_of_a_block_equal_the_reference",
    "joins_of_bags_kernel": "test_columns_gpu.py::test_cut_bags_equal_the_reference",
    "offsets_kernel": "test_offsets_shim.py::test_on_a_gpu",
    "entries_kernel": "test_columns_gpu.py::test_gradients_equal_the_references",
    "sums_kernel": "test_columns_gpu.py::test_gradients_equal_the_references",
    "joins_kernel": "test_columns_gpu.py::test_gradients_equal_the_references",
    "update_kernel": "test_row_update_shim.py::test_on_a_gpu",
    "stage_kernel": "test_stage_shim.py::test_on_a_gpu",
    "deliver_kernel": "test_stage_shim.py::test_on_a_gpu",
    "attention_kernel": "test_target_attention.py::test_on_a_gpu",
    "chain_kernel": "test_linear_chains.py::test_on_a_gpu",
    "heads_kernel": "test_heads.py::test_on_a_gpu",
    "grouped_kernel": "test_grouped_linears.py::test_on_a_gpu",
    "compress_kernel": "test_compressed_interaction.py::test_on_a_gpu",
    "splits_kernel": "test_compressed_interaction.py::test_on_a_gpu",
    "cross_kernel": "test_cross_layers.py::test_on_a_gpu",
    "dots_kernel": "test_dot_rows.py::test_on_a_gpu",
    "k_largest_kernel": "test_k_largest.py::test_on_a_gpu",
    "pairs_kernel": "test_pair_products_shim.py::test_on_a_gpu",
    "mixtures_kernel": "test_mixtures_shim.py::test_on_a_gpu",
    "gathered_kernel": "test_gathered_dots.py::test_on_a_gpu",
    "few_rows_kernel": "test_few_rows.py::test_equals_fp64",
    "dot_kernel": "test_linear_layers.py::test_equals_fp64",
    "sliced_kernel": "test_linear_layers.py::test_equals_fp64",
    "short_kernel": "test_linear_layers.py::test_equals_fp64",
    "short_halves_kernel": "test_linear_layers.py::test_halves",
    "pad_kernel": "test_linear_layers.py::test_halves",
    "pointwise_kernel": "test_pointwise_gpu.py::test_random_plans",
    "last_kernel": "test_linear_layers.py::test_a_single_output_behind_parts",
}
# Other ways through them.
MORE = (
    "test_columns_gpu.py::test_a_bad_id_is_named_and_the_device_lives_on",
    "test_columns_gpu.py::test_clamp_counts",
    "test_columns_gpu.py::test_copies_and_ids_of_any_strides_equal_the_reference",
    "test_columns_gpu.py::test_broken_offsets_are_reported",
    "test_columns_gpu.py::test_rows_in_8_bits",
    "test_columns_gpu.py::test_staged_rows_give_the_same_bits",
    "test_columns_gpu.py::test_short_bags_equal_the_reference",
    "test_columns_gpu.py::test_tiles_equal_the_reference",
    "test_linear_layers.py::test_rows_of_any_stride",
    "test_gathered_dots.py::test_bad_ids_on_a_gpu",
)
PROFILER = "profiler"  # sees that each test launches what KERNELS says
# Under racecheck cuBLAS's kernels for halves stop at an error of the tool itself (2025.3): cases that call them.
CRASHES = "not 9-40-48 and not 64-415 and not 64-64-32 and not 5-3-24"
TOOLS = {
    "memcheck": ("--padding", "1024"),
    "racecheck": ("--racecheck-report", "all"),
    "synccheck": (),
}


@dataclass(frozen=True)
class Mutant:
    """A bug: what a file of fxopt/kernels says, what it says instead, and which test of which tool must notice."""

    tool: str
    file: str
    old: str
    new: str
    test: str


MUTANTS = (
    Mutant("memcheck", "columns/cuda/rows.cuh", "bad |= uint64_t(id[k]) >= rows;", "", MORE[0]),
    Mutant(
        "racecheck",
        "target_attention/cuda/attention.cu",
        "  }\n  team.barrier();\n  run_tail",
        "  }\n  run_tail",
        KERNELS["attention_kernel"],
    ),
)


@dataclass(frozen=True)
class Told:
    """What a run of one test under one tool ended with. clean: the test passed and the tool found nothing."""

    tool: str
    test: str
    clean: bool
    reported: bool
    seconds: float
    text: str


def run(tool: str, test: str, root: Path = ROOT) -> Told:
    """Runs a test of tests/cuda of a tree."""
    checked = [sanitizer(), "--tool", tool, "--error-exitcode", "86", "--kernel-name", "kns=5fxopt", *TOOLS[tool]]
    words = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", f"tests/cuda/{test}"]
    words += ["-k", CRASHES] if tool == "racecheck" else []
    settings = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    done = subprocess.run(
        [*checked, *words], cwd=root, env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    text = done.stdout + done.stderr
    none = re.search(r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards displayed", text)
    clean = done.returncode == 0 and none is not None and re.search(r"\d+ passed", text) is not None
    reported = done.returncode == 86 and none is None and "SUMMARY" in text
    return Told(tool, test, clean, reported, time.perf_counter() - start, text)


def sanitizer() -> str:
    """compute-sanitizer, on PATH or beside nvcc.

    Raises:
        FileNotFoundError: there is none.
    """
    beside = nvcc()
    found = shutil.which("compute-sanitizer") or (beside and shutil.which(str(beside.with_name("compute-sanitizer"))))
    if not found:
        raise FileNotFoundError("compute-sanitizer is neither on PATH nor beside nvcc")
    return found


def unlaunched(text: str) -> list[str]:
    """Kernels that their tests (whose names hold `text`) do not launch, by torch's profiler."""
    import pytest
    from torch.profiler import ProfilerActivity, profile

    missing = []
    for test in sorted(test for test in set(KERNELS.values()) if text in test):
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            code = pytest.main(["-x", "-p", "no:cacheprovider", str(ROOT / "tests/cuda" / test)])
        names = {event.name for event in profiled.events() or []}
        for kernel in (kernel for kernel, driver in KERNELS.items() if driver == test):
            if code or not any(re.search(rf"\bfxopt::.*\b{kernel}\b", name) for name in names):
                missing.append(kernel)
    return missing


def planted(mutant: Mutant) -> Told:
    """What the mutant's tool tells of it, in a copy of the tree."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("fxopt", "tests", "bench"):
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        path = Path(folder) / "fxopt/kernels" / mutant.file
        text = path.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.file} no longer holds what the mutant replaces"
        path.write_text(text.replace(mutant.old, mutant.new))
        return run(mutant.tool, mutant.test, Path(folder))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.sanitize", description=__doc__)
    parser.add_argument("tools", nargs="*", help=f"of {', '.join((PROFILER, *TOOLS))}; default: all")
    parser.add_argument("-k", default="", metavar="TEXT", help="tests whose name holds this alone")
    parser.add_argument("--planted", action="store_true", help="kernels with a bug each, which must be reported")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("python -m tests.cuda.sanitize: no CUDA device here", file=sys.stderr)
        return 2
    tools = args.tools or (PROFILER, *TOOLS)
    if args.planted:
        calls = [(planted, (mutant,)) for mutant in MUTANTS]
    else:
        if PROFILER in tools and (missing := unlaunched(args.k)):  # and it builds what the others run
            print(f"tests fail, or do not launch {', '.join(missing)}")
            return 1
        tests = sorted(test for test in {*KERNELS.values(), *MORE} if args.k in test)
        calls = [(run, (tool, test)) for tool in tools if tool != PROFILER for test in tests]
    wrong = 0
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for told in pool.map(lambda call: call[0](*call[1]), calls):
            right = told.reported if args.planted else told.clean
            wrong += not right
            print(f"{'ok' if right else 'WRONG'}  {told.tool}  {told.test}  {told.seconds:.0f} s", flush=True)
            if not right:
                print(told.text[-4000:])
    print(f"{len(calls)} runs, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
