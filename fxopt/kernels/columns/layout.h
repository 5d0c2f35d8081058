// The records of an encoded plan (encode.py writes them) and what a call hands to the kernel.
#pragma once
#include <cstdint>

#include "../entry.h"

namespace fxopt {

constexpr int64_t kVersion = 0x46584F500002;

// Same codes as c10::ScalarType; op.cpp asserts it.
enum DType : int32_t {
  kUInt8 = 0, kInt8 = 1, kInt16 = 2, kInt32 = 3, kInt64 = 4, kHalf = 5, kFloat = 6, kDouble = 7, kBool = 11, kBFloat16 = 15,
};

// For every CPU that kernels are compiled for, and for GPUs. Always inlined: a shared copy might be one for a newer CPU.
#ifdef __CUDACC__
#define FXOPT_ANYWHERE __host__ __device__ __forceinline__
#else
#define FXOPT_ANYWHERE [[gnu::always_inline]] inline
#endif

FXOPT_ANYWHERE bool is_floating(int dtype) { return dtype == kFloat || dtype == kDouble || dtype == kHalf || dtype == kBFloat16; }

// In bytes; 0: a dtype that no column has.
FXOPT_ANYWHERE int element_size(int dtype) {
  switch (dtype) {
    case kUInt8: case kInt8: case kBool: return 1;
    case kInt16: case kHalf: case kBFloat16: return 2;
    case kInt32: case kFloat: return 4;
    case kInt64: case kDouble: return 8;
    default: return 0;
  }
}

// An integer as its dtype holds it.
FXOPT_ANYWHERE int64_t wrap(int64_t x, int dtype) {
  switch (dtype) {
    case kUInt8: return uint8_t(x);
    case kInt8: return int8_t(x);
    case kInt16: return int16_t(x);
    case kInt32: return int32_t(x);
    case kBool: return x != 0;
    default: return x;
  }
}

struct Source {
  int32_t tensor;
  int8_t row0, row1, lane, n_fixed;  // dims, -1: none
  int64_t start, length, fixed_at;   // length -1: to the end of the dim
};

enum Pool : int8_t { kNone, kSum, kMean, kMax };
enum Masked : int8_t { kScaled, kFilled, kLowered };
enum Flag : int16_t {
  kEmptyNan = 1, kWrapNegative = 2, kAdd = 4, kHasPadding = 8, kHasBag = 16, kIsMasked = 32, kHasFrozen = 64, kCounted = 128,
  kSharedGrad = 256,
};

struct Column {
  Source source;
  int32_t table, output;  // table -1: a copy of values
  int64_t offset;
  int32_t program_at, program_size;
  int8_t pool, masked;
  int16_t flags;
  int32_t index;  // in the Python plan
  int64_t padding, extra;

  bool has(Flag flag) const { return flags & flag; }
};

struct Extra {
  Source weights, divisor, lengths;
  int32_t bag, include_last, segment, segments;
  int32_t divisor_at, divisor_size, lengths_at, lengths_size;  // programs
  int64_t frozen;
  double masked_value;
};

enum Op : uint8_t {
  kCast = 1, kAddConstant, kMul, kRSub, kDiv, kRemainder, kFmod, kFloorDivide, kClampMin, kClampMax, kAnd, kAbs,
  kFloor, kCeil, kSqrt, kBucketize, kAddTensor, kSave, kWhere, kTrunc, kKeep,
  kOr, kXor, kLShift, kRShift, kSwap, kCombine,
};

constexpr int kRegisters = 2;  // what SAVE, SWAP and COMBINE name by b; WHERE compares the first

struct Instr {
  uint8_t op, dtype, compare, kinds;  // kinds: bit 0 a is a double, bit 1 b is
  int32_t tensor;
  int64_t a, b;
};

struct Fixed {
  int64_t dim, index;
};

struct Output {
  int64_t width;  // -1: lanes times dim
  int32_t dtype, measured, unused[2];  // measured: the column that tells the number of rows
};

struct Tile {
  int32_t output, first, count, heavy;
};

struct Header {
  int64_t version, n_columns, n_extras, n_instrs, n_fixed, n_outputs, n_tiles, bad_ids;  // bad_ids: cuda/record.h's Mode
};

static_assert(sizeof(Source) == 32 && sizeof(Column) == 80 && sizeof(Extra) == 144 && sizeof(Instr) == 24);
static_assert(sizeof(Output) == 24 && sizeof(Tile) == 16 && sizeof(Header) == 64);

// The records of one plan, in the order of encode.py's FORMATS.
struct Plan {
  const Header* header;
  const Column* columns;
  const Extra* extras;
  const Instr* instrs;
  const Fixed* fixed;
  const Output* outputs;
  const Tile* tiles;

  explicit Plan(const int64_t* words)
      : header(reinterpret_cast<const Header*>(words)),
        columns(reinterpret_cast<const Column*>(header + 1)),
        extras(reinterpret_cast<const Extra*>(columns + header->n_columns)),
        instrs(reinterpret_cast<const Instr*>(extras + header->n_extras)),
        fixed(reinterpret_cast<const Fixed*>(instrs + header->n_instrs)),
        outputs(reinterpret_cast<const Output*>(fixed + header->n_fixed)),
        tiles(reinterpret_cast<const Tile*>(outputs + header->n_outputs)) {}
};

// A table of uint8 has rows in 8 bits: D codes, then this, as quantized.py writes them.
struct Quantization {
  float scale, offset;
};

inline int64_t row_dim(const Array& table) { return table.dtype == kUInt8 ? table.sizes[1] - int64_t(sizeof(Quantization)) : table.sizes[1]; }

struct OutputData {
  char* data;
  int64_t rows, width;
};

// A plan, and the tensors of a call.
struct Given {
  Plan plan;
  const Array *tensors, *tables;
  int64_t n_tensors, n_tables;
};

inline Given given_of(const Request& request) {
  return {Plan(request.words), request.operands, request.argument(1), request.counts[0], request.counts[1]};
}

}  // namespace fxopt
