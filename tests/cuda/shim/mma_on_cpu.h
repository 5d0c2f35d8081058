// The tensor core's product, thread by thread: who holds what is mma.cuh's word.
template <bool BFLOAT>
inline float wide_on_cpu(uint16_t bits) {
  return BFLOAT ? shim::from_bits<float>(uint64_t(bits) << 16) : fxopt::cuda::half_to_float(bits);
}
template <bool BFLOAT>
inline uint16_t rounded_on_cpu(float x) { return BFLOAT ? fxopt::cuda::float_to_bfloat16(x) : fxopt::cuda::float_to_half(x); }

template <bool BFLOAT>
inline void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const int thread = shim_lane(), row = thread / 4, column = thread % 4 * 2;
  float sums[4] = {};
  for (int k = 0; k < 16; k++) {
    const int half = k % 2 * 16, holder = k % 8 / 2, later = k >= 8;
    uint32_t left[2], right[2];
    for (int r = 0; r < 2; r++) left[r] = __shfl_sync(kAll, a[later * 2 + r], row * 4 + holder);
    for (int c = 0; c < 2; c++) right[c] = __shfl_sync(kAll, b[later], (column + c) * 4 + holder);
    for (int u = 0; u < 4; u++)
      sums[u] += wide_on_cpu<BFLOAT>(uint16_t(left[u / 2] >> half)) * wide_on_cpu<BFLOAT>(uint16_t(right[u % 2] >> half));
  }
  for (int u = 0; u < 4; u++) d[u] += sums[u];
}
