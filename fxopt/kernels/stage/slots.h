// What a graph's inputs and outputs look like to those who copy them; op.py writes the same structs.
#pragma once
#include <cstdint>

namespace fxopt::stage {

// Rows from `input`'s on are filled: with the last one, with bits that are all ones (no id, NaN), or (fill >= 0) with the
// number of rows of that input.
enum Fill : int32_t { kOnes = -1, kRepeat = -2 };

struct Slot {
  char* to;  // at a multiple of 16
  int64_t row_bytes, capacity;
  int32_t input, fill;
};

struct Item {
  int32_t slot, part;
};

struct Shape {
  int64_t rows, stride;  // stride in bytes
};

// Of an input as one word.
#ifdef __CUDACC__
__host__ __device__
#endif
inline Shape shape_of(int64_t word) { return {word & 0x7fffffff, word >> 32}; }

// Of a call, on the device: where an output goes, and how much of it. In front of all of them: how many rows are real, and 0.
struct Target {
  int64_t to, bytes;
};

constexpr int kMostOutputs = 64;

// Everything but the inputs and the targets of one call.
struct Stage {
  const Slot* slots;  // on the device, and so are items
  const Item* items;
  int32_t n_items, n_inputs;
  const Slot* packed;  // on the host, into `pinned`, which is copied to `device`
  char *pinned, *device;
  int64_t packed_bytes;
  int32_t n_packed, n_outputs;
  Target* targets;  // of 1 + kMostOutputs, on the device
  int64_t* counts;  // of each input, on the device: its rows in this call
};

}  // namespace fxopt::stage
