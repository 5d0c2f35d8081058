"""Bugs planted in the columns kernel, which the shim must notice: a library holds all of them, asleep."""

from __future__ import annotations

from pathlib import Path

from fxopt.kernels.columns.cuda import KERNEL
from tests.cuda.planted import planted
from tests.cuda.shim_library import Shim, compile_shim

LAUNCH = "check_launched(fxopt::launch(kernel, all, kWarps * 32, stream, parameters));"
JOINS = "check_launched(fxopt::launch(joins_of_bags_kernel, of_cut, kWarps * 32, stream, parameters));"
AT_BAG = "  Bag bag = bag_of(launch, record, row, rows, wanted);"
# What is wrong, where, and what the source says instead where shim::planted is the bug's number.
MUTATIONS = {
    "no bounds check": ("rows.cuh", "bad |= uint64_t(id[k]) >= rows;", "bad |= !{} && uint64_t(id[k]) >= rows;"),
    "no mask of the tail": ("rows.cuh", "if (row < live &&", "if (({} || row < live) &&"),
    "no mask of the tail of codes": ("codes.cuh", "if (row < live)", "if ({} || row < live)"),
    "the scale of another row": ("codes.cuh", "_at(row + record.dim)", "_at(({} ? table : row) + record.dim)"),
    "the scale beside its place": ("codes.cuh", "_at(from + left)", "_at(from + left - 4 * {})"),
    "no barrier after staging": (
        "rows.cuh",
        *("  __syncwarp();\n  bool sorted = true;", "  if (!{}) __syncwarp();\n  bool sorted = true;"),
        *("edges.sorted = __all_sync(kAll, sorted) != 0", "edges.sorted = {} || __all_sync(kAll, sorted) != 0"),
    ),
    "threads leave before a collective": ("pool.cuh", AT_BAG, f"  if ({{}} && !wanted) return;\n{AT_BAG}"),
    "a join that does not wait for the parts": (
        "host.h", LAUNCH, f"if (!{{}} || !cut) {LAUNCH}", JOINS, f"{JOINS} if ({{}}) {LAUNCH}"
    ),
    "parts that overlap": ("parts.cuh", "bag.length = int(first + size)", "bag.length = int(first + size) + {}"),
    "no mask behind the last chunk": ("rows.cuh", "|| slot[c] < 32))", "|| {} || slot[c] < 32))"),
    "rows of an inner dim read as outer ones": ("rows.cuh", "* places.inner_step", "* ({} ? 1 : places.inner_step)"),
    "floats that are rounded up": ("rows.cuh", "id[k] = truncate(", "id[k] = {} + truncate("),
    "what is added to the first position": ("rows.cuh", "data + position[k] %", "data + position[{} ? 0 : k] %"),
    "ids of two strides in a tile": ("image.h", "&& r.ids.view.inner == 0", "&& ({} || r.ids.view.inner == 0)"),
    "rows of other threads": ("gather.cuh", "first + u * step", "first + u * ({} ? 1 : step)"),
    "no mask of converted rows": ("gather.cuh", "if (row < live &&", "if (({} || row < live) &&"),
    "another row's divisor": ("gather.cuh", "__shfl_sync(kAll, by, row)", "__shfl_sync(kAll, by, {} ? 0 : row)"),
    "a block that does not wait for its parts": (
        "columns.cu", "  __syncthreads();\n  join_in_block", "  if (!{}) __syncthreads();\n  join_in_block"
    ),
    "a block that forgets to join the last part": (
        "parts.cuh", "part < kWarps; part++) found", "part < kWarps - {}; part++) found"
    ),
    "weights of the turn before": ("pool.cuh", "bag, at + width + thread)", "bag, at + ({} ? 0 : width) + thread)"),
    "weights that wrap around": ("pool.cuh", "u < lanes.group || kAlike", "u < lanes.group || {} || kAlike"),
    "elements behind a loose row": ("chunks.cuh", "left > 3", "left > 3 || {}"),
    "any NaN wins a maximum": ("pool.cuh", "|| at + thread == 0", "|| at + thread == 0 || {}"),
    "a NaN loses though it comes first": ("pool.cuh", "|| at + thread == 0", "|| (at + thread == 0 && !{})"),
    "a maximum of nothing": ("bag.cuh", "count || record.pool != kMax", "count || {} || record.pool != kMax"),
    "a loose row's chunk too far": ("chunks.cuh", "d < left; d++) {", "(d < left || {}); d++) {"),
    "a wait for one turn less": (
        "staged.cuh",
        *("wait_copies<kRing - 1>()", "({} ? wait_copies<kRing>() : wait_copies<kRing - 1>())"),
        *("wait_copies<kRing / 2 - 1>()", "({} ? wait_copies<kRing / 2>() : wait_copies<kRing / 2 - 1>())"),
        *("wait_copies<kRing / 4 - 1>()", "({} ? wait_copies<kRing / 4>() : wait_copies<kRing / 4 - 1>())"),
    ),
    "copies of ids there are not": ("staged.cuh", "real = one >= 0 && mine", "real = (one >= 0 || {}) && mine"),
    "a tile without a barrier": ("tiles.cuh", "  __syncthreads();", "  if (!{}) __syncthreads();"),
    "no bounds check in a tile": ("tiles.cuh", "bad |= uint64_t(id[k])", "bad |= !{} && uint64_t(id[k])"),
    "no mask of a tile's tail": ("tiles.cuh", "< live) __stcs", "< live || {}) __stcs"),
    "a tile moves what it has no ids of": ("tiles.cuh", "!tile.found[column]", "!({} || tile.found[column])"),
    "ids of a tile that come late": ("tiles.cuh", "load_next(at + 32 *", "load_next(at + ({} ? 0 : 32) *"),
    "no bounds check in short bags": ("short_bags.cuh", "good = next.high", "good = {} || next.high"),
    "rows of the next bag": ("short_bags.cuh", "u < end)", "u < end + {})"),
    "ids beyond the run": ("short_bags.cuh", "from + u < all", "from + u < all + {}"),
    "ids of a run that come late": ("short_bags.cuh", "load_next(k + kRun)", "load_next(k + ({} ? 0 : kRun))"),
    "ids behind a bag left out": ("short_bags.cuh", "by = k >= start[b] ?", "by = k >= start[b] && !{} ?"),
    "no mask of bags that are not there": ("short_bags.cuh", "if (row + b < rows &&", "if (({} || row + b < rows) &&"),
    "bags left out stay so": ("short_bags.cuh", "apart != 0", "apart != 0 && !{}"),
    "what is added to the first lane": ("column.h", "step.tensor += lane *", "step.tensor += ({} ? 0 : lane) *"),
    "another lane's ids": ("column.h", "view.offset += lane *", "view.offset += ({} ? 0 : lane) *"),
    "what is added to a bag's first id": ("bag.cuh", "step.tensor + lane *", "step.tensor + ({} ? 0 : lane) *"),
    "ids that do not count": ("bag.cuh", "else if (step.op == kKeep) found", "else if (step.op == kKeep && !{}) found"),
    "a turn of the ring too early": ("staged.cuh", "& (kRing - 1)", "& (kRing / (1 + {}) - 1)"),
}  # fmt: skip


def build(folder: Path, *flags: str) -> Shim:
    mutations = {name: (f"columns/cuda/{file}", *changes) for name, (file, *changes) in MUTATIONS.items()}
    return Shim(compile_shim(folder, planted(KERNEL, folder, mutations), "-O0", *flags))
