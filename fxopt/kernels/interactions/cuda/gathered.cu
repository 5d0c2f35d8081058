// Dots of pairs of vectors that are rows of embedding tables: a warp a sample reads them from where they are, and nobody
// writes what the columns of the plan would have. A thread a vector finds its row; then all rows are on their way at once.
#define FXOPT_WORDS 64  // of launch parameters: a pointer for each column's ids, and one of an output
#include "../../columns/cuda/column.h"
#include "../../columns/cuda/device.h"
#include "../../columns/cuda/errors.cuh"
#include "pairs.cuh"

namespace fxopt::cuda {

enum Found : uint8_t { kPlainId, kByProgram, kCopied };  // how a vector is come to

// What a thread needs of its vector, in 32 bytes: 27 threads that read a Record each take 1.4 us longer (2048 samples).
struct alignas(16) Vector {
  const char* table;
  int32_t rows, table_stride;  // bytes
  int32_t offset, row_stride;  // of its ids, or of itself in a tensor: bytes
  int16_t word;
  uint8_t dtype, found;
};
static_assert(sizeof(Vector) == 32);

struct Gathered {
  Launch columns;
  const Vector* vectors;
  dots::Row row;
  dots::Copying copying;
};

constexpr uint64_t kNoVector = 1;

// Where vector `number` is; kNoVector for an id that is outside its table. All 32 threads call it, each for its own.
FXOPT_DEVICE uint64_t address_of(const Gathered& g, int number, bool wanted, int sample) {
  const Vector v = g.vectors[number];
  const char* data = reinterpret_cast<const char*>(g.columns.words[v.word]) + v.offset + int64_t(sample) * v.row_stride;
  wanted = wanted && v.found != kCopied;
  int64_t id = 0;
  if (wanted) {
    if (v.found == kByProgram) id = evaluate(g.columns, g.columns.records[number].ids, sample, 0).v.i;
    else if (v.dtype == kInt64) id = load_as<long long>(data);
    else id = load_as<int>(data);
  }
  if (__any_sync(kAll, wanted && uint64_t(id) >= uint64_t(v.rows))) id = checked(g.columns, g.columns.records[number], wanted, id, sample);
  if (v.found == kCopied) return reinterpret_cast<uint64_t>(data);
  return id == kBad ? kNoVector : reinterpret_cast<uint64_t>(v.table + id * v.table_stride);
}

// 16 bytes of a vector that is not there, or not aligned.
__device__ __noinline__ void fetch_slowly(uint16_t* to, uint64_t from, uint32_t at) {
#pragma unroll 1
  for (int k = 0; k < 8; k++) to[k] = from == kNoVector ? 0x7fff : load_as<unsigned short>(reinterpret_cast<const char*>(from + at) + k * 2);
}

template <class K>
__global__ void __launch_bounds__(K::kWarps * 32) gathered_kernel(const __grid_constant__ Gathered g) {
  in_turn();
  __shared__ dots::Block<K> shared;
  const int warp = int(threadIdx.x) >> 5, thread = int(threadIdx.x) & 31, sample = int(blockIdx.x) * K::kWarps + warp;
  if (sample < g.row.samples) {
    const bool mine = thread < g.row.fields;
    const uint64_t address = address_of(g, mine ? thread : 0, mine, sample);
    dots::for_chunks(g.copying, g.row.fields, [&](int vector, uint32_t chunk, bool real) {
      const uint64_t from = __shfl_sync(kAll, static_cast<unsigned long long>(address), vector & 31);
      if (!real) return;
      auto* to = &shared.rows[warp][vector][chunk * K::kChunk];
      if (from % 16 == 0) copy_async_cached(to, reinterpret_cast<const char*>(from) + chunk * 16);
      else fetch_slowly(reinterpret_cast<uint16_t*>(to), from, chunk * 16);
    });
  }
  commit_copies();
  dots::write_row(g.row, shared, warp, sample);
}

// The records of a plan whose columns are the vectors, in the order of the vectors.
struct Vectors : Columns {
  static constexpr const char* kUnfit = "fxopt-unfit";  // gathered.py then does without this kernel

  using Columns::Columns;

  Image image_of(const OutputData& shape, int64_t dim, int dtype) {
    const Plan& plan = resolver.plan;
    const int64_t n = plan.header->n_columns, bytes = dim * element_size(dtype);
    image.records.resize(n);
    std::vector<bool> known(n);
    if (n > dots::kFields) refused("%s: %lld vectors", kUnfit, (long long)n);
    for (int64_t c = 0; c < n; c++) {
      const Record r = record(plan.columns[c]);
      const int64_t at = r.out_offset / bytes;
      if (r.out_offset % bytes || at >= n || known[at] || !fits(r, bytes)) refused("%s: column %d", kUnfit, r.index);
      image.records[at] = r;
      known[at] = true;
    }
    image.segments.push_back({shape.rows, shape.rows, 0, 0, int32_t(n), 32, 1, 0, nullptr});
    if (int(resolver.words.values.size()) > kWords) refused("%s: too many tensors", kUnfit);
    image.words = std::move(resolver.words.values);
    return std::move(image);
  }

  static Vector vector_of(const Record& r) {
    const View& view = r.ids.view;
    const bool plain = r.ids.n_steps == 0 && view.inner == 0 && (view.dtype == kInt64 || view.dtype == kInt32);
    if (std::max({view.offset, view.row_stride, r.table_rows, r.table_stride}) > INT32_MAX) refused("%s: column %d", kUnfit, r.index);
    return {r.table, int32_t(r.table_rows), int32_t(r.table_stride), int32_t(view.offset), int32_t(view.row_stride), int16_t(view.word), uint8_t(view.dtype),
            r.kind == kCopy ? kCopied : plain ? kPlainId : kByProgram};
  }

 private:
  // A vector as it lies: a row of a table, or one of a tensor.
  static bool fits(const Record& r, int64_t bytes) {
    const bool whole = int64_t(r.chunks) * r.chunk_bytes == bytes && r.chunk_bytes > kCodes && r.lanes == 1;
    return whole && (r.kind == kRows || (r.kind == kCopy && r.way == kPosition && r.places.inner == 0));
  }
};

static void gathered_dots(const Request& request, const Array* rest, int64_t stride, cudaStream_t stream, int index) {
  const Plan plan = checked_plan(request);
  const Array &before = rest[0], &i = rest[1], &j = rest[2];
  Device& device = device_of(index);
  const bool captured = captures(device, stream);
  if (plan.header->n_outputs != 1 || request.counts[1] < 1 || before.dim != 2 || i.dim != 1 || j.dim != 1) refused("%s: its tensors", Vectors::kUnfit);
  const OutputData shape = measure(given_of(request), plan.outputs[0]);  // that nobody writes
  const int dtype = plan.outputs[0].dtype, known = dtype == kFloat ? 0 : dtype == kHalf ? 1 : 2;
  const int64_t dim = row_dim(*request.argument(1)), fields = plan.header->n_columns;
  const bool numbers = before.dtype == dtype && (dtype == kFloat || dtype == kHalf || dtype == kBFloat16) && i.dtype == kInt64 && j.dtype == kInt64;
  const bool close = (before.strides[1] == 1 || before.sizes[1] == 1) && i.strides[0] == 1 && j.strides[0] == 1;
  const bool sizes = shape.width == fields * dim && before.sizes[0] == shape.rows && shape.rows <= INT32_MAX && i.sizes[0] == j.sizes[0] && stride >= before.sizes[1] + i.sizes[0] && stride <= INT32_MAX;
  if (!numbers || !close || !sizes) refused("%s: dtypes, strides or sizes", Vectors::kUnfit);
  Gathered g;
  g.row = {before.data, reinterpret_cast<const int64_t*>(i.data), reinterpret_cast<const int64_t*>(j.data), nullptr, before.strides[0],
           int32_t(shape.rows), int32_t(fields), int32_t(dim), int32_t(before.sizes[1]), int32_t(i.sizes[0]), int32_t(stride)};
  if (const char* why = dots::unfit(g.row, known)) refused("%s: %s", Vectors::kUnfit, why);
  const Image image = Vectors(request, &shape).image_of(shape, dim, dtype);
  g.row.out = request.output({shape.rows, stride}, dtype);
  if (shape.rows == 0) return;
  g.columns = parameters_of(device, request, image, stream, captured);
  std::vector<Vector> of_threads;
  for (const Record& r : image.records) of_threads.push_back(Vectors::vector_of(r));
  std::string bytes;
  append(bytes, of_threads);
  g.vectors = reinterpret_cast<const Vector*>(device.keep(request.words + 1, bytes, captured));  // the plan's own address is the records'
  if (!g.vectors) refused("%s: no room for its records", Vectors::kUnfit);
  g.copying = dots::Copying::of(dim * element_size(dtype));
  const char* wrong = dots::of_dtype(known, int(dim), [&](auto kind) {
    using K = decltype(kind);
    const dim3 blocks(unsigned((shape.rows + K::kWarps - 1) / K::kWarps));
    return fxopt::launch(gathered_kernel<K>, blocks, K::kWarps * 32, stream, g);
  });
  if (wrong) refused("fxopt.gathered_dots: %s", wrong);
  wait_if_blocking(device, stream, captured);
}

}  // namespace fxopt::cuda

// A row of dots for each of the plan's: `rest` are what stands before them, and the pairs. False: `text` (256 bytes) says why.
FXOPT_EXPORT bool fxopt_cuda_dots(const fxopt::Request* request, const fxopt::Array* rest, int64_t width, void* stream, int device, char* text) {
  return fxopt::done(text, [&] { fxopt::cuda::gathered_dots(*request, rest, width, static_cast<cudaStream_t>(stream), device); });
}
