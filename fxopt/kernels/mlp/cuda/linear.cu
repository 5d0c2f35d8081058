// Linear layers that leave cuBLAS idle: short dot products, what is left of long ones cut in parts, and single outputs or rows.
#include "../../abi.h"
#include "../../grid.cuh"
#include "dots.cuh"
#include "last.cuh"
#include "short.cuh"
#include "short_halves.cuh"
#include "sliced.cuh"

namespace fxopt::linear {

struct Padded {
  const uint16_t* from;
  uint16_t* out;  // [rows, width]
  int64_t stride;
  int32_t rows, columns, width;  // width: a multiple of 8
};

// Rows of halves with zeros behind them: a thread 16 bytes.
__global__ void __launch_bounds__(kThreads) pad_kernel(const Padded p) {
  in_turn();
  const int64_t thread = int64_t(blockIdx.x) * kThreads + int(threadIdx.x);
  const int eights = p.width / kEight;
  const int64_t row = thread / eights;
  const int column = int(thread - row * eights) * kEight;
  if (row >= p.rows) return;
  Vector<uint16_t, kEight> eight;
#pragma unroll
  for (int k = 0; k < kEight; k++) eight.value[k] = column + k < p.columns ? __ldg(p.from + row * p.stride + column + k) : uint16_t(0);
  *reinterpret_cast<Vector<uint16_t, kEight>*>(p.out + row * p.width + column) = eight;
}

static unsigned blocks_for(int64_t size, int each) { return unsigned((size + each - 1) / each); }

template <class T, int SIZE, int WARPS, int ROWS, int AHEAD>
static const char* launch_dots(const Dots& d, void* stream) {
  static_assert(WARPS == 1 ? ROWS == 1 : WARPS == kDotWarps);
  return launch(dot_kernel<T, SIZE, WARPS, ROWS, AHEAD>, dim3(blocks_for(d.m, kDotWarps / WARPS * ROWS)), kDotThreads, stream, d);
}

// A row of 4 KB and more takes a block: 8152 by 1024 fp32 5.9 us, by warps 8.9, 1024 by 128 2.0 and 2.3, 512 by 512 2.1 and 1.8.
// One that a warp reads at once leaves room for more warps.
template <class T, int SIZE>
static const char* launch_dots(const Dots& d, void* stream) {
  const int bytes = d.k * int(sizeof(typename T::Bits));
  if (bytes >= 4096) return launch_dots<T, SIZE, kDotWarps, 4, 2>(d, stream);
  return d.k <= 32 * SIZE ? launch_dots<T, SIZE, 1, 1, 1>(d, stream) : launch_dots<T, SIZE, 1, 1, 4>(d, stream);
}

template <class T>
static const char* launch_dots(const Dots& d, void* stream) {
  constexpr int kWide = 16 / sizeof(typename T::Bits);
  const auto addresses = reinterpret_cast<uint64_t>(d.rows) | reinterpret_cast<uint64_t>(d.vector);
  const bool wide = addresses % 16 == 0 && (d.k | d.stride) % kWide == 0;
  return wide ? launch_dots<T, kWide>(d, stream) : launch_dots<T, 1>(d, stream);
}

template <int ROWS, int PARTS = 0>
static const char* launch_floats(const Short& s, void* stream) {
  const dim3 blocks(blocks_for(s.m, Tile<ROWS>::kRows), blocks_for(s.n, Tile<ROWS>::kColumns));
  return launch(short_kernel<ROWS, PARTS>, blocks, kThreads, stream, s);
}

template <class T, int ROWS, int COLUMNS>
static const char* launch_halves(const Short& s, void* stream) {
  const dim3 blocks(blocks_for(s.m, kThreads / 32 * ROWS * 16), blocks_for(s.n, COLUMNS * 8));
  return launch(short_halves_kernel<T, ROWS, COLUMNS>, blocks, kThreads, stream, s);
}

template <class T>
static const char* launch_halves(const Short& s, void* stream) {
  return s.tall ? launch_halves<T, 2, 4>(s, stream) : launch_halves<T, 1, 4>(s, stream);
}

}  // namespace fxopt::linear

// All: nullptr, or what went wrong. dtype: 0 float, 1 half, 2 bfloat16.
FXOPT_EXPORT const char* fxopt_linear_short(const fxopt::linear::Short* s, int dtype, void* stream) {
  using namespace fxopt::linear;
  if (s->k > kMostIn) return "fxopt.gpu_linear: dot products of at most 64";
  if (dtype == 1) return launch_halves<fxopt::Half>(*s, stream);
  if (dtype == 2) return launch_halves<fxopt::BFloat16>(*s, stream);
  return s->tall ? launch_floats<4>(*s, stream) : launch_floats<1>(*s, stream);
}
// Floats alone.
FXOPT_EXPORT const char* fxopt_linear_finish(const fxopt::linear::Short* s, int, void* stream) {
  using namespace fxopt::linear;
  if (s->k > kMostIn || s->n % 4 || s->parts > kMostParts) return "fxopt.gpu_linear: 8 parts, a rest of at most 64, and outputs by fours";
  return launch_floats<1, kMostParts>(*s, stream);
}
// Floats alone, the vector at 16 bytes.
FXOPT_EXPORT const char* fxopt_linear_last(const fxopt::linear::Last* l, int, void* stream) {
  using namespace fxopt::linear;
  if (l->layer.n % 4 || l->layer.parts > kMostParts) return "fxopt.gpu_linear: 8 parts, and outputs by fours";
  return fxopt::launch(last_kernel, dim3(blocks_for(l->layer.m, kThreads / 32)), kThreads, stream, *l);
}
FXOPT_EXPORT const char* fxopt_linear_dots(const fxopt::linear::Dots* d, int dtype, void* stream) {
  using namespace fxopt::linear;
  if (dtype == 1) return launch_dots<fxopt::Half>(*d, stream);
  return dtype == 2 ? launch_dots<fxopt::BFloat16>(*d, stream) : launch_dots<fxopt::Float>(*d, stream);
}
FXOPT_EXPORT const char* fxopt_linear_pad(const fxopt::linear::Padded* p, int, void* stream) {
  using namespace fxopt::linear;
  if (p->width % kEight) return "fxopt.gpu_linear: a width of a multiple of 8";
  return fxopt::launch(pad_kernel, dim3(blocks_for(int64_t(p->rows) * (p->width / kEight), kThreads)), kThreads, stream, *p);
}
// Floats alone.
FXOPT_EXPORT const char* fxopt_linear_sliced(const fxopt::linear::Sliced* s, int, void* stream) {
  using namespace fxopt::linear;
  return s->tf32 ? launch_sliced<InTf32>(*s, stream) : launch_sliced<InFull>(*s, stream);
}
