// out[b, p] = z[b, i[p]] * z[b, j[p]], or its sum: a block has the vectors of a few samples in shared memory. For products a
// thread multiplies UNIT numbers of a pair, and neighbouring threads write side by side; for dots it sums a pair.
#include "../../columns/cuda/async.cuh"
#include "../../floats.cuh"
#include "../../grid.cuh"

#include <algorithm>
#include <cmath>

namespace fxopt::pairs {

constexpr int kThreads = 256, kMostSamples = 8;
constexpr int kBlocks = 4;                      // of each multiprocessor, where there are rows for so many
constexpr int kRoom = 48 << 10, kGood = 16384;  // bytes of dynamic shared memory: at most, and for several samples

struct Pairs {
  Operand z;              // [samples, fields, dim], whose last stride is 1
  const int64_t *i, *j;   // [pairs]
  float* out;             // [samples, pairs, dim], or [samples, pairs]
  int32_t samples, fields, dim, pairs, dots;
  int32_t block_samples;  // set here, as what follows: a block's samples,
  int32_t parts, piece;   // in how many parts a sample's pairs are, of how many each,
  int32_t pitch;          // and from a vector in shared memory to the next, in units
};
static_assert(sizeof(Pairs) == 32 + 3 * 8 + 40);

// Which of a sample's vectors a pair takes; -1: there is no such one.
__device__ __forceinline__ int field_of(const int64_t* index, int pair, int fields) {
  int64_t at = __ldg(reinterpret_cast<const long long*>(index) + pair);
  at += at < 0 ? fields : 0;
  return uint64_t(at) < uint64_t(fields) ? int(at) : -1;
}

// The vectors of samples [first, first + live), on their way to shared memory.
template <int UNIT>
__device__ __forceinline__ void copy_vectors(const Pairs& p, int first, int live, Vector<float, UNIT>* to) {
  const int chunks = p.dim / UNIT, lanes = kThreads / chunks, lane = int(threadIdx.x) / chunks, chunk = int(threadIdx.x) % chunks;
  const int vectors = lane < lanes ? live * p.fields : 0;
  for (int vector = lane; vector < vectors; vector += lanes) {
    const int sample = vector / p.fields, field = vector - sample * p.fields;
    const int64_t from = (first + int64_t(sample)) * p.z.strides[0] + field * p.z.strides[1] + chunk * UNIT;
    cuda::copy_async_few<UNIT * 4>(to + vector * p.pitch + chunk, static_cast<const float*>(p.z.data) + from, true);
  }
}

template <int UNIT>
__device__ __forceinline__ Vector<float, UNIT> product(const Vector<float, UNIT>& x, const Vector<float, UNIT>& y) {
  Vector<float, UNIT> found;
#pragma unroll
  for (int k = 0; k < UNIT; k++) found.value[k] = x.value[k] * y.value[k];
  return found;
}

template <int UNIT>
__device__ __forceinline__ float dot(const Vector<float, UNIT>* x, const Vector<float, UNIT>* y, int chunks) {
  float sums[UNIT] = {}, total = 0;
#pragma unroll 4
  for (int chunk = 0; chunk < chunks; chunk++) {
    const Vector<float, UNIT> one = x[chunk], other = y[chunk];
#pragma unroll
    for (int k = 0; k < UNIT; k++) sums[k] = fmaf(one.value[k], other.value[k], sums[k]);
  }
#pragma unroll
  for (int k = 0; k < UNIT; k++) total += sums[k];
  return total;
}

template <int UNIT, bool DOTS>
__global__ void __launch_bounds__(kThreads) pairs_kernel(const __grid_constant__ Pairs p) {
  in_turn();
  auto* const vectors = reinterpret_cast<Vector<float, UNIT>*>(dynamic_shared());
  const int first = int(blockIdx.x) / p.parts * p.block_samples, begin = int(blockIdx.x) % p.parts * p.piece;
  const int samples = p.samples - first < p.block_samples ? p.samples - first : p.block_samples;
  const int pairs = p.pairs - begin < p.piece ? p.pairs - begin : p.piece;
  copy_vectors<UNIT>(p, first, samples, vectors);
  cuda::commit_copies();
  cuda::wait_copies<0>();
  __syncthreads();
  const int chunks = p.dim / UNIT, width = DOTS ? 1 : chunks;  // threads of a pair
  const int lanes = kThreads / width, lane = int(threadIdx.x) / width, chunk = int(threadIdx.x) % width;
  auto* const out = reinterpret_cast<Vector<float, DOTS ? 1 : UNIT>*>(p.out) + (int64_t(first) * p.pairs + begin) * width + chunk;
  if (lane >= lanes) return;
  for (int sample = 0, pair = lane;; pair += lanes) {  // from one sample's last pairs on to the next one's first
    while (pair >= pairs && sample < samples) pair -= pairs, sample++;
    if (sample >= samples) return;
    const int i = field_of(p.i, begin + pair, p.fields), j = field_of(p.j, begin + pair, p.fields);
    const auto* const own = vectors + sample * p.fields * p.pitch + chunk;
    const auto *x = own + (i < 0 ? 0 : i) * p.pitch, *y = own + (j < 0 ? 0 : j) * p.pitch;
    Vector<float, DOTS ? 1 : UNIT> found;
    if constexpr (DOTS) found.value[0] = dot<UNIT>(x, y, chunks);
    else found = product<UNIT>(*x, *y);
#pragma unroll
    for (float& value : found.value) value = i < 0 || j < 0 ? NAN : value;
    out[(sample * p.pairs + pair) * width] = found;
  }
}

// Of dots, threads that read one chunk of neighbouring vectors use other banks; products read whole vectors side by side.
static int pitch_of(const Pairs& p, int unit) { return p.dots ? p.dim / unit | 1 : p.dim / unit; }

// As many samples a block as leave no multiprocessor idle; where one a block does, their pairs in parts.
static const char* divide(Pairs& p, int unit) {
  int processors = 0;
  if (const char* why = multiprocessors(&processors)) return why;
  p.pitch = pitch_of(p, unit);
  const int64_t bytes = int64_t(p.fields) * p.pitch * unit * 4, wanted = int64_t(processors) * kBlocks;
  if (bytes > kRoom) return "fxopt.gpu_pairs: expected vectors of at most 48 KB a sample";
  const int64_t threads = int64_t(p.pairs) * (p.dots ? 1 : p.dim / unit);
  p.block_samples = int(std::max<int64_t>(1, std::min({int64_t(kMostSamples), p.samples / wanted, kGood / bytes})));
  const int64_t parts = std::min((wanted + p.samples - 1) / p.samples, (threads + kThreads - 1) / kThreads);
  p.piece = int((p.pairs + parts - 1) / parts);
  p.parts = (p.pairs + p.piece - 1) / p.piece;
  return nullptr;
}

template <int UNIT>
static const char* run(Pairs& p, void* stream) {
  if (p.dim > kThreads * UNIT) return "fxopt.gpu_pairs: expected vectors that a block's threads can share";
  if (const char* why = divide(p, UNIT)) return why;
  const int64_t blocks = (int64_t(p.samples) + p.block_samples - 1) / p.block_samples * p.parts;
  const int shared = p.block_samples * p.fields * p.pitch * UNIT * 4;
  return launch(p.dots ? pairs_kernel<UNIT, true> : pairs_kernel<UNIT, false>, dim3(unsigned(blocks)), kThreads, stream, p, shared);
}

// How many numbers of a vector can be read and written at once.
static int unit_of(const Pairs& p) {
  const int64_t all = int64_t(reinterpret_cast<uint64_t>(p.z.data) | reinterpret_cast<uint64_t>(p.out)) / 4 | p.z.strides[0] | p.z.strides[1] | p.dim;
  return all % 4 == 0 ? 4 : all % 2 == 0 ? 2 : 1;
}

}  // namespace fxopt::pairs

// Of floats. nullptr, or what went wrong.
FXOPT_EXPORT const char* fxopt_pairs(const fxopt::pairs::Pairs* given, int, void* stream) {
  using namespace fxopt::pairs;
  Pairs p = *given;
  const int unit = unit_of(p);
  return unit == 4 ? run<4>(p, stream) : unit == 2 ? run<2>(p, stream) : run<1>(p, stream);
}
