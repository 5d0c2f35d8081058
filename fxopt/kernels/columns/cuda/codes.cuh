// Rows in 8 bits, as quantized.py lays them out: read in 16-byte chunks by bags, four codes at a time by lookups.
#pragma once
#include "gather.cuh"

namespace fxopt::cuda {

struct Codes {
  static constexpr int kSize = 16, kUnroll = 4;
  static constexpr bool kIsMax = false;
  struct Chunk {
    uint4 codes;
    Quantization by;
  };
  FXOPT_DEVICE static Chunk nothing() { return {}; }
  FXOPT_DEVICE static Chunk load(const char* from, int left) {  // `left`: codes from here to the row's end
    return {__ldg(reinterpret_cast<const uint4*>(from)), quantization_at(from + left)};
  }
  FXOPT_DEVICE static void add(float* sum, const Chunk& chunk, float w) {
    const unsigned words[4] = {chunk.codes.x, chunk.codes.y, chunk.codes.z, chunk.codes.w};
#pragma unroll
    for (int k = 0; k < 16; k++) sum[k] = fmaf(dequantized(words[k / 4] >> k % 4 * 8 & 255, chunk.by), w, sum[k]);
  }
};

// As move_rows: rows as floats. A chunk is four codes, and 16 bytes of the output.
FXOPT_DEVICE void widen_rows(const Record& record, const char* table, const int (&ids)[4], char* out, uint32_t live) {
  const uint32_t thread = threadIdx.x & 31, chunks = record.chunks, magic = record.chunk_magic;
  const uint32_t table_stride = uint32_t(record.table_stride), out_stride = uint32_t(record.out_stride);
#pragma unroll 1
  for (uint32_t number = thread; number < 32 * chunks; number += 32) {
    const uint32_t slot = chunks == 1 ? number : __umulhi(number, magic), at = (number - slot * chunks) * 4;
#pragma unroll 1
    for (int half = 0; half < 4; half += 2) {  // all four at a time take more registers than there are
      unsigned codes[2];
      Quantization by[2];
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const char* row = table + uint64_t(uint32_t(__shfl_sync(kAll, half ? ids[2 + k] : ids[k], int(slot)))) * table_stride;
        codes[k] = load_as<unsigned>(row + at);
        by[k] = quantization_at(row + record.dim);
      }
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const uint32_t row = (half + k) * 32 + slot;
        const float4 four{dequantized(codes[k] & 255, by[k]), dequantized(codes[k] >> 8 & 255, by[k]),
                          dequantized(codes[k] >> 16 & 255, by[k]), dequantized(codes[k] >> 24, by[k])};
        if (row < live) __stcs(reinterpret_cast<float4*>(out + at * 4 + uint64_t(row) * out_stride), four);
      }
    }
  }
}

}  // namespace fxopt::cuda
