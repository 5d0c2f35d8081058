// The tensor core's product in TF32, thread by thread: who holds what is tf32.cuh's word. It takes no more than 10 bits.
inline float rounded(float x) {
  const uint32_t bits = uint32_t(shim::bits(x));
  return (bits >> 23 & 0xff) == 0xff ? x : shim::from_bits<float>(uint64_t((bits + 0x1000) & 0xffffe000u));
}

inline void mma(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
  const int thread = shim_lane(), row = thread / 4, column = thread % 4 * 2;
  for (const float x : {a[0], a[1], a[2], a[3], b[0], b[1]})
    if (x == x && (shim::bits(x) & 0x1fff)) shim::complain("more bits than TF32 has");
  float sums[4] = {};
  for (int k = 0; k < 8; k++) {
    float left[2], right[2];
    for (int r = 0; r < 2; r++) left[r] = __shfl_sync(0xffffffffu, a[k / 4 * 2 + r], row * 4 + k % 4);
    for (int c = 0; c < 2; c++) right[c] = __shfl_sync(0xffffffffu, b[k / 4], (column + c) * 4 + k % 4);
    for (int u = 0; u < 4; u++) sums[u] += left[u / 2] * right[u % 2];
  }
  for (int u = 0; u < 4; u++) d[u] += sums[u];
}
