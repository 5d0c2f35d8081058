// What the host resolves of a plan for one call, and the device reads: records in an image, pointers in the launch.
#pragma once
#include <cstdint>

#include "../layout.h"

namespace fxopt::cuda {

// value(row, lane) of a Source. `word` is where the launch holds its tensor's pointer, -1: none. Strides are in bytes.
struct View {
  int32_t word, dtype;
  int64_t offset;
  int64_t row_stride, inner_stride, lane_stride;
  int64_t inner;  // row = (row / inner, row % inner); 0: one row dim
};

// A source and an index program over it.
struct Values {
  View view;
  int32_t steps_at, n_steps, dtype;  // dtype: of the result
};

// Where rows.cuh reads position p: outer_step * (p / inner) + inner_step * (p % inner) steps from the first; inner 0: p steps.
struct Places {
  int32_t step;  // bytes
  uint32_t inner, outer_step, inner_step;
};

constexpr uint8_t kCodes = 1;  // a Record's chunk_bytes where rows in 8 bits become floats, a chunk of four codes at a time
enum Kind : int8_t { kCopy, kRows, kConvert, kBags, kLooseBags, kBagsAny };  // see gather.cuh and pool.cuh
// How rows.cuh comes to the ids of a kRows column. kTruncate: floats as int64. kAddition: of what a tensor has for each row of
// the inner dim. kSteps: by any program. kPosition: the row itself, of a tensor that is copied. kAnyWay: by gather.cuh.
enum Way : int8_t { kAnyWay, kNoSteps, kTruncate, kStagedBucketize, kLongRemainder, kAddition, kSteps, kPosition };
enum RecordFlag : int32_t {  // beyond layout.h's, which keep their bits
  kAccurate = 1 << 16,  // arithmetic in fp64
  kDense = 1 << 17,     // a padded bag: NaN wins a maximum
  kDivides = 1 << 18,
  kHasLengths = 1 << 19,
  kHasWeights = 1 << 20,
  kFlat = 1 << 21,   // positions need no splitting into row and lane
  kPlain = 1 << 22,  // int32 or int64 ids that nothing changes
  kWeighted = 1 << 23,  // such ids, and a weight in float32, float16 or bfloat16 for each
  kStepped = 1 << 24,   // a bag's ids, by few steps: see stepped() in bag.cuh
};

// One column. Those of one output slot follow each other by `next`, in plan order.
struct Record {
  Values ids;
  Places places;
  const char* edges;
  int32_t n_edges, edges_stride;
  const char* table;
  int64_t table_rows, table_stride, column_stride;
  int64_t dim, lanes, padding;
  int64_t out_offset, out_stride;  // bytes
  int32_t out_word, flags, index, next, extra;
  uint32_t chunks, chunk_magic;  // chunks of a table row, and ceil(2^32 / chunks)
  uint8_t chunk_bytes, table_dtype, out_dtype, group_log2;  // 2^group_log2 lanes cover a row: of kBags and kLooseBags its chunks, else its dims
  int8_t kind, pool, masked, way;
  uint8_t lane, unused[3];  // lane: of the column, where the record has this one only
};

// What few columns have.
struct Rare {
  View weights;
  Values divisor, lengths;
  double masked_value;
  int64_t offsets_stride;  // bytes
  int32_t offsets_word, offsets_dtype, segment, bounds_word;  // words [bounds] number of ids, [bounds + 1] of offsets
};

// An instruction with its operands in the type they are used in: int64, float bits or double bits.
struct Step {
  uint8_t op, dtype, compare, tensor_dtype;
  int32_t n;           // boundaries
  const char* tensor;  // boundaries, or what ADD_TENSOR adds
  int64_t stride, a, b;
  uint64_t magic;      // floor(2^64 / |a|) of an integer division
};

// Units (chains of records) that share their number of rows and the way warps cover them: items [first_item, ...).
struct Segment {
  int64_t rows, positions;  // positions = rows * lanes; 0: bags
  int32_t first_item, first_unit, units;
  int32_t span;  // positions an item covers, a multiple of 32; or lanes of a warp that share a bag
  int32_t parts, part_stride;  // of a bag, a warp each; part_stride: floats, 0 where they are the warps of one block
  float* sums;                 // of parts: [units, rows, parts, part_stride], see parts.cuh
  int32_t chunks;              // of 16 bytes of a row where a block takes a tile (tiles.cuh), 0: where a warp takes an item
  int32_t bags;                // of an item: 32 / span, more of short ones (short_bags.cuh)
};

struct PartTotals {
  int32_t count, kept, poisoned, unused;
};
constexpr int kTotalsFloats = sizeof(PartTotals) / 4;

// A column's entries among those of all columns of a backward, and the row whose gradient stays zero (-1: none).
struct Span {
  int64_t base, count, rows, frozen;
  int32_t table, unused;
};

enum Mode : int32_t { kRaise, kClamp, kUnchecked };
enum FailureKind : int32_t { kNoFailure, kBadId, kBadOffsets, kBadLength, kBadTotal };

struct Failure {
  int32_t kind, column;
  int64_t row, lane, value, rows, plan;
};

// In device memory; `report` is in host memory that the device can write.
struct Errors {
  unsigned long long key;  // of the first (column, row) reported so far, plus 1; 0: none
  unsigned long long clamped;
  Failure* report;
  unsigned int lock;
};

// What tuning.py builds otherwise. Registers for loads in flight serve better than more warps: H200, MICRO'24's bags, 475 us
// so, 508 with three blocks and half the loads, 640 with four.
#ifndef FXOPT_BLOCKS
#define FXOPT_BLOCKS 2
#endif
#ifndef FXOPT_LOADS
#define FXOPT_LOADS 8
#endif
#ifdef FXOPT_STAGED
constexpr bool kStaged = true;
#else
constexpr bool kStaged = false;  // narrow bags win 4-10% by it, calls with little to do lose
#endif
constexpr int kBlocks = FXOPT_BLOCKS, kLoads = FXOPT_LOADS;  // of a multiprocessor; of rows of plain bags, a thread
constexpr int kRing = 8;  // chunks of 16 bytes that a thread has on their way to shared memory, see staged.cuh

constexpr int kSegments = 12, kWarps = 8;
constexpr bool kShortBags = !kStaged;  // as runs, see short_bags.cuh; beside staged rows they would spill
// Short bags that the lanes of a row take as one run. H200, E whole at batch 256: 57.4 us, 62.9 with four, where too few warps
// are at work; 26 x 2048 bags of one id take 22.7 and 16.8, of 0 to 44 ids 53.1 and 52.0.
constexpr int kBeside = 2;
constexpr int kMostSpan = 256;  // positions of an item or a tile
constexpr int kEdges = 256, kGroups = 8;  // boundaries that a warp keeps in shared memory, and groups of them
constexpr int kShared = kStaged ? kRing * 128 : kEdges + 4 * kGroups;  // floats of a warp
#ifndef FXOPT_WORDS
#define FXOPT_WORDS 3936  // launch parameters end at 32,764 bytes
#endif
constexpr int kWords = FXOPT_WORDS;

struct Launch {
  const Record* records;
  const Rare* rares;
  const Step* steps;
  const Span* spans;
  Errors* errors;
  const int64_t* real_rows;  // of a batch padded to `capacity`; null: all rows are
  int64_t capacity, plan;
  int32_t mode, items, in_blocks, tiles, n_segments, entries_word;  // in_blocks: the first items; entries_word: of gradients, see backward.cuh
  Segment segments[kSegments];
  int64_t words[kWords];  // pointers of inputs and outputs, sizes of bags
};
static_assert(sizeof(Launch) <= 32764);

}  // namespace fxopt::cuda
