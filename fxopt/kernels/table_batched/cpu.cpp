// The operator on the CPU: the description of the tables is read and checked, then bags go over torch's threads.
#include "../entry.h"
#include "../threads.h"
#include "layout.h"

namespace fxopt {

FXOPT_CHOSEN(kernels, table_batched)

constexpr int64_t kGrain = 256;  // bags
constexpr int32_t kDtypeUInt8 = 0, kDtypeInt32 = 3;
constexpr int kBits[] = {32, 16, 8, 4, 2};  // of FBGEMM's SparseTypes FP32, FP16, INT8, INT4, INT2

static const Array& flat(const Array& array, int32_t dtype, const char* name) {
  if (array.dim != 1 || array.dtype != dtype || (array.sizes[0] > 1 && array.strides[0] != 1))
    refused("fxopt.table_batched: %s must be contiguous, 1-D and of its dtype", name);
  return array;
}

static Integers integers(const Array& array, const char* name) {
  return {flat(array, array.dtype == kDtypeInt32 ? kDtypeInt32 : kDtypeInt64, name).data, array.dtype != kDtypeInt32};
}

// A table of one feature in the memory.
struct Table {
  int bits;
  int64_t place, rows, dim, stride;

  Table(int type, int64_t place, int64_t rows, int64_t dim, int64_t alignment)
      : bits(type < 5 ? kBits[type] : 0), place(place), rows(rows), dim(dim),
        stride((dim * bits / 8 + header(bits) + alignment - 1) / alignment * alignment) {}

  bool lies_in(int64_t bytes) const {
    return bits && dim > 0 && dim * bits % 8 == 0 && place >= 0 && place <= bytes && rows >= 0 && rows <= (bytes - place) / stride;
  }
};

// Operands: memory uint8, and for each feature its table's type uint8, place int64, rows int64, and where its numbers
// begin in the output, int32 [F + 1]; ids, offsets, weights. words: how bags are pooled, alignment of rows, width of the output.
static void run(const Request& request) {
  if (request.n_operands != 8 || request.n_words != 3) refused("fxopt.table_batched: expected 8 tensors and 3 numbers");
  const Array* const given = request.operands;
  const Array& memory = flat(given[0], kDtypeUInt8, "memory");
  const Array& types = flat(given[1], kDtypeUInt8, "types");
  const auto* places = reinterpret_cast<const int64_t*>(flat(given[2], kDtypeInt64, "places").data);
  const auto* rows = reinterpret_cast<const int64_t*>(flat(given[3], kDtypeInt64, "rows").data);
  const auto* dims = reinterpret_cast<const int32_t*>(flat(given[4], kDtypeInt32, "dims").data);
  const Integers ids = integers(given[5], "ids"), offsets = integers(given[6], "offsets");
  const float* weights = given[7].is_none() ? nullptr : reinterpret_cast<const float*>(flat(given[7], kDtypeFloat, "weights").data);
  const int64_t F = types.sizes[0], n_bags = given[6].sizes[0] - 1, n_ids = given[5].sizes[0];
  const int64_t pooling = request.words[0], alignment = request.words[1];
  const bool pooled = pooling != 2;
  if (F < 1 || given[2].sizes[0] != F || given[3].sizes[0] != F || given[4].sizes[0] != F + 1 || dims[0] != 0 || pooling < 0 ||
      pooling > 2 || alignment < 1 || alignment > 128 || n_bags < 0 || n_bags % F || (weights && given[7].sizes[0] != n_ids))
    refused("fxopt.table_batched: sizes that do not belong together");
  const auto table = [&](int64_t f) { return Table(uint8_t(types.data[f]), places[f], rows[f], dims[f + 1] - dims[f], alignment); };
  for (int64_t f = 0; f < F; f++) {
    if (!table(f).lies_in(memory.sizes[0]) || (!pooled && table(f).dim != dims[1]))
      refused("fxopt.table_batched: table %lld does not lie in its memory", (long long)f);
  }
  if (offsets[0] != 0 || (!pooled && offsets[n_bags] != n_ids)) refused("fxopt.table_batched: offsets of other ids");
  const int64_t B = n_bags / F, width = pooled ? dims[F] : dims[1];
  if (width != request.words[2]) refused("fxopt.table_batched: rows of another width");
  float* out = request.floats({pooled ? B : n_ids, width});
  std::atomic<bool> good{true};
  const auto some = [&](int64_t first, int64_t last) {
    for (int64_t at = first; at < last;) {
      const int64_t f = at / B, end = last < (f + 1) * B ? last : (f + 1) * B;
      const Table of = table(f);
      const Bags job{memory.data + of.place, of.bits, of.rows, of.stride, of.dim, ids, offsets, n_ids, at, end, weights, pooled,
                     pooling == 1, pooled ? out + dims[f] - f * B * width : out, width};
      if (!chosen->look_up(job)) good = false;
      at = end;
    }
  };
  in_parts(n_bags, kGrain, some);
  if (!good) refused("fxopt.table_batched: an id outside of its table, or offsets that do not grow");
}

}  // namespace fxopt

FXOPT_EXPORT void fxopt_table_batched_run(const fxopt::Request* request) { fxopt::run(*request); }
