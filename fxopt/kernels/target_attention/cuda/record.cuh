// What a launch is told, and the warps that take a row.
#pragma once
#include "../../floats.cuh"

namespace fxopt::target {

constexpr int kWarps = 16, kRows = 16, kMost = 128;  // warps of a block, at most; positions of a warp at a time; columns
constexpr int kMostOperands = 48, kMostBlocks = 16, kMostTerms = 16, kMostKeys = 4, kMostProducts = 8, kMostQueries = 8;
constexpr int kMostLayers = 5, kMostNorms = 4, kMostConstants = 13, kMostSteps = 40, kMostTail = 8, kMostRegisters = 12;
constexpr int kParameter = 100, kConstant = 10000;  // from these numbers on what a step reads is an operand, or a constant

// As in plan.py.
enum Op : int32_t { kLinear, kBatchNorm, kAdd, kSub, kMul, kDiv, kMaximum, kMinimum, kNeg, kExp, kSigmoid, kTanh, kSilu, kPRelu };
enum TailOp : int32_t { kScale, kShift, kFill, kFillWhere, kTimesMask, kPlusMask, kSoftmax };
enum Activation : int32_t { kSteps, kNone, kRelu };

// Tensors are operands by number, -1: none. Places are floats from the start of shared memory on, a query's from that of
// the team; widths in it are multiples of 8, and behind a matrix's own are zeros. Matrices are tiles of 8 rows and 8
// columns, those of the same columns side by side, for fragments without an address of their own; their rows are as many as
// run_layers knows. The stride of a warp's inputs is an odd multiple of 8, for no two rows on one bank.
struct Block { int32_t weight, place, n, rows, width, first, terms; };  // part of a matrix: the sum of some terms
struct Term { int32_t start; float scale; };                              // columns of a weight
struct Query { int32_t row, place, width; };                              // a row's source
struct Keys { int32_t position, column, width; };                         // a source of positions, among the inputs
struct Product { int32_t column, query, width, from; };  // inputs from a column on, times a query or -1; from: the weight's column
struct Layer { int32_t bias, n, groups, k, place, from, to, activation, out, begin, end, result; };
struct Norm { int32_t mean, variance, weight, bias, place, n; float eps; };  // place: of a scale and a shift a column
struct Step { int32_t op, out, left, right; };
struct TailStep { int32_t op, mask; float value; };

struct Attention {
  Operand operands[kMostOperands];  // the first is the output
  int32_t rows, exact;
  int32_t positions, blocks, queries, keys, products, layers, tail, values, width, bool_masks;
  int32_t stride, query_weight, query_width;  // the first: of a warp's inputs
  int32_t weights, of_team, bytes, team;  // floats of shared memory; its bytes that a block may have; warps of a team
  Block block[kMostBlocks];
  Term term[kMostTerms];
  Query queried[kMostQueries];
  Keys key[kMostKeys];
  Product product[kMostProducts];
  Layer layer[kMostLayers];
  Norm norm[kMostNorms];
  float constant[kMostConstants];
  Step step[kMostSteps];
  TailStep tail_step[kMostTail];
};
static_assert(sizeof(Attention) == kMostOperands * 32 + 76 + kMostBlocks * 28 + kMostTerms * 8 + kMostQueries * 12 + kMostKeys * 12 +
                                       kMostProducts * 16 + kMostLayers * 48 + kMostNorms * 28 + kMostConstants * 4 + kMostSteps * 16 +
                                       kMostTail * 12);
static_assert(sizeof(Attention) <= 4096);

// Warps that take a row together, and what they have of shared memory: few pointers, to have few registers.
struct Team {
  int warps, thread;
  float* memory;
  float* score;   // of every position
  float* inputs;  // of this warp [kRows, stride]; those of the team lie side by side

  __device__ Team(const Attention& a, float* block) : warps(a.team), thread(int(threadIdx.x) % (a.team * 32)) {
    memory = block + a.weights + number() * a.of_team;
    score = query() + a.query_width;
    inputs = block + a.weights + int(blockDim.x) / threads() * a.of_team + int(threadIdx.x) / 32 * kRows * a.stride;
  }

  __device__ __forceinline__ int number() const { return int(threadIdx.x) / threads(); }
  __device__ __forceinline__ int threads() const { return warps * 32; }
  __device__ __forceinline__ int warp() const { return thread / 32; }
  __device__ __forceinline__ int& count() const { return *reinterpret_cast<int*>(memory); }  // of valid positions
  __device__ __forceinline__ float* by_warp() const { return memory + 8; }
  __device__ __forceinline__ float* first() const { return memory + 8 + kWarps; }  // the row's part of the first layer
  __device__ __forceinline__ float* query() const { return memory + 8 + kWarps + kMost; }
  __device__ __forceinline__ int* valid(const Attention& a) const { return reinterpret_cast<int*>(score + a.positions); }

  __device__ __forceinline__ void barrier() const {
    if (warps == 1) __syncwarp();
    else __barrier_sync_count(unsigned(1 + number()), unsigned(threads()));
  }
};
__device__ __forceinline__ int padded(int size) { return (size + 7) / 8 * 8; }

template <class T>
__device__ __forceinline__ float at(const Attention& a, int operand, int64_t i, int64_t j = 0, int64_t k = 0) {
  const Operand& x = a.operands[operand];
  return load<T>(x.data, i * x.strides[0] + j * x.strides[1] + k * x.strides[2]);
}

template <class T>
__device__ __forceinline__ float mask_at(const Attention& a, int operand, int row, int position) {
  if (!a.bool_masks) return at<T>(a, operand, row, position);
  const Operand& x = a.operands[operand];
  return __ldg(static_cast<const unsigned char*>(x.data) + row * x.strides[0] + position * x.strides[1]) ? 1.0f : 0.0f;
}

}  // namespace fxopt::target
