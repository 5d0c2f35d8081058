// The tensor core's product in TF32, thread by thread: who holds what is tf32.cuh's word. It takes no more than 10 bits.
inline float rounded(float x) {
  const uint32_t bits = uint32_t(shim::bits(x));
  return (bits >> 23 & 0xff) == 0xff ? x : shim::from_bits<float>(uint64_t((bits + 0x1000) & 0xffffe000u));
}

inline void mma(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
  struct Given { const float *a, *b; };
  const int thread = shim_lane(), row = thread / 4, column = thread % 4 * 2;
  for (const float x : {a[0], a[1], a[2], a[3], b[0], b[1]})
    if (x == x && (shim::bits(x) & 0x1fff)) shim::complain("more bits than TF32 has");
  const Given own{a, b};
  const uint64_t* all = shim_warp(0xffffffffu, "mma", shim::bits(&own));
  float sums[4] = {};
  for (int k = 0; k < 8; k++) {
    for (int u = 0; u < 4; u++) {
      const Given *left = shim::from_bits<const Given*>(all[row * 4 + k % 4]), *right = shim::from_bits<const Given*>(all[(column + u % 2) * 4 + k % 4]);
      sums[u] += left->a[k / 4 * 2 + u / 2] * right->b[k / 4];
    }
  }
  __syncwarp();  // everybody has read what the others gave
  for (int u = 0; u < 4; u++) d[u] += sums[u];
}
