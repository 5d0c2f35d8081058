// What the host resolves of a plan for one call, and the device reads: records in an image, pointers in the launch.
#pragma once
#include <cstdint>

#include "../layout.h"

namespace fxopt::cuda {

// value(row, lane) of a Source. `word` is where the launch holds its tensor's pointer; strides are in bytes.
struct View {
  int32_t word, dtype;
  int64_t offset;
  int64_t row_stride, inner_stride, lane_stride;
  int64_t inner;  // rows = (row / inner, row % inner); 0: one row dim
};

enum Kind : int8_t { kValues, kRows, kConvert, kBags, kBagsAny };  // see gather.cuh and pool.cuh
enum RecordFlag : uint8_t {  // beyond layout.h's, which keep their bits
  kAccurate = 16,  // sums in fp64
  kDense = 32,     // a padded bag: NaN wins a maximum
};

// One column. Those of one output slot follow each other by `next`, in plan order.
struct Record {
  View ids;
  const char* table;
  int64_t table_rows, table_stride, column_stride;
  int64_t dim, lanes, padding;
  int64_t out_offset, out_stride;  // bytes
  int32_t out_word, steps_at, n_steps, index, next, extra;
  int32_t edges;                // the step whose boundaries a warp keeps in shared memory, -1: none
  uint32_t chunks, chunk_magic;  // per table row, and ceil(2^32 / chunks)
  uint8_t chunk_bytes, table_dtype, out_dtype, flags;
  int8_t kind, pool, group_log2, unused;  // kBags: 2^group_log2 lanes cover a row
};

struct Extras {
  View weights, divisor;                       // word -1: none
  int64_t offsets_stride;                      // bytes
  int32_t offsets_word, offsets_dtype, segment, bounds_word;  // words [bounds] number of ids, [bounds + 1] of offsets
};

// An instruction with its operands in the type they are used in: int64, float bits or double bits.
struct Step {
  uint8_t op, dtype, compare, tensor_dtype;
  int32_t word;    // of boundaries or of an added tensor
  int64_t a, b;
  uint64_t magic;  // floor(2^64 / |a|) of an integer division
  int64_t stride, n;
};

// Units (chains of records) that share their number of rows and the way warps cover them: items [first_item, ...).
struct Segment {
  int64_t rows, positions;  // positions = rows * lanes, of columns without a bag
  int32_t first_item, first_unit, units;
  int32_t span;  // positions an item covers, a multiple of 32; or lanes of a warp that cover a bag
};

enum Mode : int32_t { kRaise, kClamp, kUnchecked };
enum FailureKind : int32_t { kNone_, kBadId, kBadOffsets };

struct Failure {
  int32_t kind, column;
  int64_t row, lane, value, rows, plan;
};

// In device memory; `report` is in host memory that the device can write.
struct Errors {
  unsigned long long key;  // the smallest (column, row) reported so far, plus 1; 0: none
  unsigned int lock;
  unsigned long long clamped;
  Failure* report;
};

constexpr int kSegments = 12, kWarps = 8, kEdgeBytes = 1024;
constexpr int kFewWords = 384, kManyWords = 3968;  // launch parameters of under 4 KB and under 32 KB

struct LaunchHead {
  const Record* records;
  const Extras* extras;
  const Step* steps;
  Errors* errors;
  int64_t plan;
  int32_t mode, items, n_segments, unused;
  Segment segments[kSegments];
};

template <int WORDS>
struct Launch {
  LaunchHead head;
  int64_t words[WORDS];  // pointers of tensors and outputs, sizes of bags
};
static_assert(sizeof(Launch<kFewWords>) <= 4096 && sizeof(Launch<kManyWords>) <= 32764);

}  // namespace fxopt::cuda
