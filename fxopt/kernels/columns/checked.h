// Whether a plan is one that encode() makes. Its own way in, past the dispatcher, is given no others; through the
// dispatcher a plan may come from anywhere: the numbers that kernels take on trust are checked here, those that depend
// on the tensors of a call where they are used.
#pragma once
#include "sizes.h"

namespace fxopt {

inline void check_source(const Plan& plan, const Source& source) {
  expect_plan(source.row0 >= -1 && source.row1 >= -1 && source.lane >= -1 && (source.row1 < 0 || source.row0 >= 0), "a source's dims");
  expect_plan(within(source.fixed_at, source.n_fixed, plan.header->n_fixed), "a source's indices");
  if (source.tensor < 0) return;  // none: the columns' own is refused where the tensors are known
  int64_t seen = 0;  // a dim that is walked along twice leads out of its tensor
  const auto once = [&](int64_t dim) {
    expect_plan(dim < 63 && !(seen >> dim & 1), "a source that reads one dim twice");
    seen |= int64_t(1) << dim;
  };
  for (int64_t dim : {source.row0, source.row1, source.lane})
    if (dim >= 0) once(dim);
  for (int k = 0; k < source.n_fixed; k++) {
    expect_plan(plan.fixed[source.fixed_at + k].dim >= 0, "an index of no dim");
    once(plan.fixed[source.fixed_at + k].dim);
  }
}

inline bool divides_by_zero(const Instr& instr) {
  const bool divides = instr.op == kRemainder || instr.op == kFmod || instr.op == kFloorDivide;
  if (!divides || (instr.kinds & 1)) return divides;  // their constants are integers
  switch (instr.dtype) {
    case kUInt8: case kInt8: return int8_t(instr.a) == 0;
    case kInt16: return int16_t(instr.a) == 0;
    case kInt32: return int32_t(instr.a) == 0;
    default: return instr.a == 0;
  }
}

inline void check_instr(const Instr& instr) {
  expect_plan(instr.op >= kCast && instr.op <= kCombine && instr.compare <= 5, "a step");
  expect_plan(instr.dtype <= kDouble || instr.dtype == kBool || instr.dtype == kBFloat16, "a step's dtype");
  expect_plan(instr.tensor >= 0 || (instr.op != kBucketize && instr.op != kAddTensor), "a step without its tensor");
  expect_plan(!divides_by_zero(instr), "a division by zero");
  const bool shifts = instr.op == kLShift || instr.op == kRShift;
  expect_plan(!shifts || (!(instr.kinds & 1) && instr.a >= 0 && instr.a < 8 * element_size(instr.dtype)), "a shift by more than all bits");
  const bool names = instr.op == kSave || instr.op == kSwap || instr.op == kCombine;
  expect_plan(!names || (!(instr.kinds & 2) && instr.b >= 0 && instr.b < kRegisters), "a register that is not there");
}

inline void check_extra(const Plan& plan, const Extra& extra) {
  for (const Source* source : {&extra.weights, &extra.divisor, &extra.lengths}) check_source(plan, *source);
  expect_plan(extra.segments >= 1 && extra.segment >= 0 && extra.segment < extra.segments && extra.include_last >> 1 == 0, "offsets");
  expect_plan(within(extra.divisor_at, extra.divisor_size, plan.header->n_instrs), "a divisor's program");
  expect_plan(within(extra.lengths_at, extra.lengths_size, plan.header->n_instrs), "a program of lengths");
}

inline void check_column(const Plan& plan, const Column& column) {
  check_source(plan, column.source);
  expect_plan(within(column.output, 1, plan.header->n_outputs) && within(column.index, 1, plan.header->n_columns), "a column's number");
  expect_plan(within(column.program_at, column.program_size, plan.header->n_instrs), "a column's program");
  expect_plan(column.extra == -1 || within(column.extra, 1, plan.header->n_extras), "what few columns have");
  expect_plan(column.pool >= kNone && column.pool <= kMax && column.masked >= kScaled && column.masked <= kLowered, "a pooling");
  const Extra* extra = column.extra < 0 ? nullptr : plan.extras + column.extra;
  const bool rare = column.flags & (kHasBag | kIsMasked | kHasFrozen | kCounted), pools = column.pool != kNone;
  expect_plan(!rare || extra, "a column without what few have");
  expect_plan(column.table >= 0 || (column.table == -1 && !pools), "copied values that are pooled");
  const bool plain = column.source.lane < 0 && column.source.row0 == 0 && column.source.row1 < 0;
  expect_plan(!column.has(kHasBag) || (plain && !column.has(kIsMasked) && extra->bag >= 0), "bags of another source");
  expect_plan(!column.has(kIsMasked) || (pools && extra->weights.tensor < 0 && !column.has(kHasPadding)), "masked lanes");
  expect_plan(!column.has(kCounted) || column.has(kIsMasked), "a count of no lanes");
}

inline void check_records(const Plan& plan) {
  const Header& header = *plan.header;
  for (int64_t k = 0; k < header.n_instrs; k++) check_instr(plan.instrs[k]);
  for (int64_t k = 0; k < header.n_extras; k++) check_extra(plan, plan.extras[k]);
  for (int64_t k = 0; k < header.n_columns; k++) check_column(plan, plan.columns[k]);
  for (int64_t k = 0; k < header.n_outputs; k++) {
    const Output& output = plan.outputs[k];
    expect_plan(output.width >= -1 && within(output.measured, 1, header.n_columns), "an output");
    expect_plan(output.dtype == kHalf || output.dtype == kFloat || output.dtype == kDouble || output.dtype == kBFloat16, "an output's dtype");
    const Column& measured = plan.columns[output.measured];
    expect_plan(measured.has(kHasBag) || measured.source.row0 >= 0, "an output without rows");
  }
  for (int64_t k = 0; k < header.n_tiles; k++) {
    const Tile& tile = plan.tiles[k];
    expect_plan(tile.count > 0 && within(tile.first, tile.count, header.n_columns) && within(tile.output, 1, header.n_outputs), "a work item");
    for (int c = tile.first; c < tile.first + tile.count; c++) expect_plan(plan.columns[c].output == tile.output, "a work item of two outputs");
  }
}

// A plan that may come from anywhere.
inline void check_encoded(const Array& words) {
  if (words.dtype != kInt64 || words.dim != 1 || (words.strides[0] != 1 && words.sizes[0] > 1))
    refused("fxopt.columns: the plan must be a contiguous 1-D int64 tensor");
  const auto* first = reinterpret_cast<const int64_t*>(words.data);
  check_counts(first, words.sizes[0]);
  check_records(Plan(first));
}

}  // namespace fxopt
