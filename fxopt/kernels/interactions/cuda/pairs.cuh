// Dots of all pairs of one sample's vectors, which a warp has in shared memory, and the row that takes them.
#pragma once
#include "../../columns/cuda/async.cuh"
#include "../../floats.cuh"
#include "../../gemm/mma.cuh"

#include <cstring>
#include <type_traits>

namespace fxopt::dots {

constexpr int kFields = 32, kPlaces = 512;

// Of one dtype, of vectors of up to DIM numbers. Rows are padded by 16 bytes, so that they start at other banks, and those
// of a Gram matrix so that the threads that write a tile do.
template <class F, int DIM>
struct Kind {
  using Float = F;
  using Bits = typename F::Bits;
  static constexpr bool kHalves = sizeof(Bits) == 2;
  static constexpr int kChunk = 16 / int(sizeof(Bits)), kPitch = DIM + kChunk;
  static constexpr int kGramPitch = kFields + (kHalves ? 8 : 1), kNan = kFields * kGramPitch;  // behind it, for pairs there are not
  static constexpr int kWarps = DIM * sizeof(Bits) > 256 ? 2 : DIM * sizeof(Bits) > 128 ? 4 : 8;  // 48 KB a block
};

// What a sample's row holds: what stands before the pairs, the pairs, zeros.
struct Row {
  const void* before;     // [samples, width], before_stride
  const int64_t *i, *j;   // [pairs]
  void* out;              // [samples, stride]
  int64_t before_stride;  // in elements
  int32_t samples, fields, dim, width, pairs, stride;
};

template <class K>
struct Block {
  __align__(16) typename K::Bits rows[K::kWarps][kFields][K::kPitch];  // then a warp's Gram matrix, [kFields, kGramPitch]
  uint16_t places[kPlaces];                                            // of the first pairs in it
};

// How a warp copies vectors, 16 bytes a thread: `vectors` of `chunks` each at a time.
struct Copying {
  uint32_t chunks, vectors, magic;  // magic: of a division by chunks, ceil(2^32 / chunks), 0 for one

  static Copying of(int64_t bytes) {
    const uint32_t n = uint32_t(bytes / 16);
    return {n, 32 / n, n > 1 ? uint32_t(((uint64_t(1) << 32) + n - 1) / n) : 0};
  }
};

// `copy(vector, chunk, real)` for all chunks of a sample's vectors, by all threads of the warp together.
template <class Copy>
__device__ __forceinline__ void for_chunks(const Copying& by, int fields, Copy copy) {
  const uint32_t thread = threadIdx.x & 31, first = by.magic ? __umulhi(thread, by.magic) : thread, chunk = thread - first * by.chunks;
#pragma unroll 4
  for (int base = 0; base < fields; base += int(by.vectors)) {
    const int vector = base + int(first);
    copy(vector, chunk, first < by.vectors && vector < fields);
  }
}

// Where pair k is in a Gram matrix that is right on and below its diagonal.
template <class K>
__device__ __forceinline__ uint16_t place_of(const Row& row, int k) {
  const long long wide_i = __ldg(reinterpret_cast<const long long*>(row.i) + k), wide_j = __ldg(reinterpret_cast<const long long*>(row.j) + k);
  int i = int(wide_i), j = int(wide_j);
  const bool narrow = i == wide_i && j == wide_j;
  i += i < 0 ? row.fields : 0;
  j += j < 0 ? row.fields : 0;
  const bool inside = narrow && unsigned(i) < unsigned(row.fields) && unsigned(j) < unsigned(row.fields);
  return inside ? uint16_t((i > j ? i : j) * K::kGramPitch + (i > j ? j : i)) : uint16_t(K::kNan);
}

// Two halves side by side, aligned to 4 bytes.
template <class K>
__device__ __forceinline__ void put_two(typename K::Bits* to, typename K::Bits first, typename K::Bits second) {
  struct alignas(4) {
    typename K::Bits first, second;
  } two{first, second};
  static_assert(sizeof two == 4);
  uint32_t bits;
  memcpy(&bits, &two, 4);
  *reinterpret_cast<uint32_t*>(to) = bits;
}

// Tensor cores: rows 0-15 by columns 0-15 and, of more vectors, rows 16-31 by all. A fragment of rows is two of columns.
template <class K>
struct TensorGram {
  static constexpr bool kBFloat = std::is_same<typename K::Float, BFloat16>::value;
  float sums[6][4];

  __device__ __forceinline__ void add(const Row& row, const typename K::Bits (*rows)[K::kPitch], int thread) {
    const int group = thread / 4, pair = thread % 4 * 2;
    const bool many = row.fields > 16;
#pragma unroll
    for (int s = 0; s < 6; s++)
#pragma unroll
      for (int u = 0; u < 4; u++) sums[s][u] = 0;
#pragma unroll 2
    for (int k = 0; k < row.dim; k += 16) {
      auto two = [&](int field, int at) { return *reinterpret_cast<const uint32_t*>(&rows[field][k + at]); };
      uint32_t b[4][2];
#pragma unroll
      for (int n = 0; n < 4; n++) {
        if (n >= 2 && !many) break;
        b[n][0] = two(n * 8 + group, pair);
        b[n][1] = two(n * 8 + group, pair + 8);
      }
      const uint32_t low[4] = {b[0][0], b[1][0], b[0][1], b[1][1]};
      halves::mma<kBFloat>(sums[0], low, b[0]);
      halves::mma<kBFloat>(sums[1], low, b[1]);
      if (!many) continue;
      const uint32_t high[4] = {b[2][0], b[3][0], b[2][1], b[3][1]};
#pragma unroll
      for (int n = 0; n < 4; n++) halves::mma<kBFloat>(sums[2 + n], high, b[n]);
    }
  }

  __device__ __forceinline__ void store(const Row& row, typename K::Bits* gram, int thread) const {
    const int group = thread / 4, pair = thread % 4 * 2;
#pragma unroll
    for (int s = 0; s < 6; s++) {
      if (s >= 2 && row.fields <= 16) break;
      typename K::Bits* corner = gram + ((s < 2 ? 0 : 16) + group) * K::kGramPitch + (s < 2 ? s : s - 2) * 8 + pair;
      put_two<K>(corner, K::Float::rounded(sums[s][0]), K::Float::rounded(sums[s][1]));
      put_two<K>(corner + 8 * K::kGramPitch, K::Float::rounded(sums[s][2]), K::Float::rounded(sums[s][3]));
    }
  }
};

// fp32: a thread takes vectors a, a + m, a + 2m, a + 3m by b, b + m, b + 2m, b + 3m for one b <= a < m, four ways m apart
// (so that threads read other banks); of more than 28 vectors, four threads take a second such tile.
template <class K>
struct PlainGram {
  float sums[2][16];

  struct Tile {
    int a, b;
    bool real;
  };
  __device__ __forceinline__ static int apart(const Row& row) { return (row.fields + 3) / 4; }
  __device__ __forceinline__ static Tile tile(const Row& row, int number) {
    int a = 0;
    while ((a + 1) * (a + 2) / 2 <= number) a++;
    return {a, number - a * (a + 1) / 2, a < apart(row)};
  }

  __device__ __forceinline__ void add(const Row& row, const float (*rows)[K::kPitch], int thread) {
    const int m = apart(row);
#pragma unroll
    for (int t = 0; t < 2; t++) {
#pragma unroll
      for (int u = 0; u < 16; u++) sums[t][u] = 0;
      const Tile at = tile(row, thread + t * 32);
      if (!at.real) continue;
#pragma unroll 1
      for (int k = 0; k < row.dim; k += 4) {
        float4 x[4], y[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
          x[r] = *reinterpret_cast<const float4*>(&rows[at.a + r * m][k]);
          y[r] = *reinterpret_cast<const float4*>(&rows[at.b + r * m][k]);
        }
#pragma unroll
        for (int u = 0; u < 16; u++) {
          const float4 &p = x[u / 4], &q = y[u % 4];
          sums[t][u] = fmaf(p.w, q.w, fmaf(p.z, q.z, fmaf(p.y, q.y, fmaf(p.x, q.x, sums[t][u]))));
        }
      }
    }
  }

  __device__ __forceinline__ void store(const Row& row, float* gram, int thread) const {
    const int m = apart(row);
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const Tile at = tile(row, thread + t * 32);
      if (!at.real) continue;
#pragma unroll
      for (int u = 0; u < 16; u++) {
        const int i = at.a + u / 4 * m, j = at.b + u % 4 * m;
        gram[(i > j ? i : j) * K::kGramPitch + (i > j ? j : i)] = sums[t][u];
      }
    }
  }
};

template <class K>
using Gram = std::conditional_t<K::kHalves, TensorGram<K>, PlainGram<K>>;

// From where the warp's rows are on their way to shared memory: the row of `sample`. All threads of the block call it,
// those of warps without a sample too.
template <class K>
__device__ __forceinline__ void write_row(const Row& row, Block<K>& shared, int warp, int sample) {
  using Bits = typename K::Bits;
  const int thread = int(threadIdx.x) & 31;
  const bool real = sample < row.samples;
  for (int k = int(threadIdx.x); k < row.pairs && k < kPlaces; k += K::kWarps * 32) shared.places[k] = place_of<K>(row, k);
  Bits* out = static_cast<Bits*>(row.out) + int64_t(sample) * row.stride;
  if (real) {
    const Bits* before = static_cast<const Bits*>(row.before) + sample * row.before_stride;
    for (int k = thread; k < row.width; k += 32) out[k] = __ldg(before + k);
    for (int k = row.width + row.pairs + thread; k < row.stride; k += 32) out[k] = K::Float::rounded(0);
  }
  cuda::wait_copies<0>();
  __syncthreads();
  if (!real) return;  // the whole warp
  Gram<K> sums;
  sums.add(row, shared.rows[warp], thread);
  __syncwarp();  // everybody has read the vectors
  Bits* gram = shared.rows[warp][0];
  sums.store(row, gram, thread);
  if (thread == 0) gram[K::kNan] = K::Float::rounded(NAN);
  __syncwarp();
  out += row.width;
  auto dot = [&](int k) { return gram[shared.places[k]]; };
  const int n = row.pairs < kPlaces ? row.pairs : kPlaces;
  if constexpr (K::kHalves) {
    const int odd = int(reinterpret_cast<uint64_t>(out) / 2 % 2), paired = (n - odd) / 2 * 2 + odd;
#pragma unroll 2
    for (int k = odd + thread * 2; k < paired; k += 64) put_two<K>(out + k, dot(k), dot(k + 1));
    if (thread == 0 && odd && n) out[0] = dot(0);
    if (thread == 1 && paired < n) out[paired] = dot(paired);
  } else {
#pragma unroll 4
    for (int k = thread; k < n; k += 32) out[k] = dot(k);
  }
#pragma unroll 1
  for (int k = n + thread; k < row.pairs; k += 32) out[k] = gram[place_of<K>(row, k)];
}

// The kernel for a dtype (of cuda_call.py) and a dim: `choose(Kind)` gives it.
template <class F, class Choose>
auto of_dim(int dim, Choose choose) { return dim <= 64 ? choose(Kind<F, 64>()) : choose(Kind<F, 128>()); }
template <class Choose>
auto of_dtype(int dtype, int dim, Choose choose) {
  return dtype == 0 ? of_dim<Float>(dim, choose) : dtype == 1 ? of_dim<Half>(dim, choose) : of_dim<BFloat16>(dim, choose);
}

// nullptr, or why these vectors do not fit.
inline const char* unfit(const Row& row, int dtype) {
  const bool fits = row.fields <= kFields && row.dim > 0 && row.dim <= 128 && row.dim % (dtype == 0 ? 4 : 16) == 0;
  return fits ? nullptr : "fxopt.gpu_dots: expected at most 32 vectors of at most 128, a multiple of 16 (fp32: 4)";
}

}  // namespace fxopt::dots
