// A warp a sample: its vectors once from memory, the dots of the pairs that are asked for in a row.
#include "pairs.cuh"

namespace fxopt::dots {

struct Dots {
  Row row;
  const char* vectors;  // [samples, fields, dim]
  Copying copying;      // set below
};

template <class K>
__global__ void __launch_bounds__(K::kWarps * 32) dots_kernel(const Dots d) {
  in_turn();
  __shared__ Block<K> shared;
  const int warp = int(threadIdx.x) >> 5, sample = int(blockIdx.x) * K::kWarps + warp;
  if (sample < d.row.samples) {
    const char* from = d.vectors + int64_t(sample) * d.row.fields * d.row.dim * int(sizeof(typename K::Bits));
    for_chunks(d.copying, d.row.fields, [&](int vector, uint32_t chunk, bool real) {
      if (real) cuda::copy_async(&shared.rows[warp][vector][chunk * K::kChunk], from + (vector * d.copying.chunks + chunk) * 16, true);
    });
  }
  cuda::commit_copies();
  write_row(d.row, shared, warp, sample);
}

}  // namespace fxopt::dots

// dtype: 0 float, 1 half, 2 bfloat16. nullptr, or what went wrong.
FXOPT_EXPORT const char* fxopt_dots(const fxopt::dots::Dots* d, int dtype, void* stream) {
  using namespace fxopt::dots;
  if (const char* why = unfit(d->row, dtype)) return why;
  return of_dtype(dtype, d->row.dim, [&](auto kind) {
    using K = decltype(kind);
    Dots dots = *d;
    dots.copying = Copying::of(d->row.dim * int64_t(sizeof(typename K::Bits)));
    const dim3 blocks(unsigned((d->row.samples + K::kWarps - 1) / K::kWarps));
    return fxopt::launch(dots_kernel<K>, blocks, K::kWarps * 32, stream, dots);
  });
}
