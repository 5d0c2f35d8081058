// One column of a call as a record: what it reads, how wide its chunks are, and which code serves it.
#pragma once
#include <algorithm>
#include <numeric>

#include "resolve.h"

namespace fxopt::cuda {

struct Image {
  std::vector<Record> records;
  std::vector<Rare> rares;
  std::vector<Step> steps;
  std::vector<Segment> segments;
  std::vector<Span> spans;
  std::vector<int64_t> words;
  int64_t items = 0, tiles = 0;  // of a warp, of a block
  int64_t in_blocks = 0;         // items, the first ones, whose neighbours share a bag
  int32_t entries_word = 0;
};

constexpr int64_t kMostChunks = 8192;              // of a row: chunk_magic is exact below
constexpr int64_t kMostPieces = 64, kPiece = 16;  // of a copied row; chunks of one, where that is not too many pieces

struct Columns {
  Resolver resolver;
  const OutputData* outputs;
  Image image;

  Columns(const Request& request, const OutputData* outputs) : resolver(request), outputs(outputs) {}

  // `alone`: in its output slot, so that a copy may be cut into pieces.
  Record record(Column column, bool alone = true) {
    const Plan& plan = resolver.plan;
    const OutputData& output = outputs[column.output];
    const int out_dtype = plan.outputs[column.output].dtype, out_size = element_size(out_dtype);
    const Resolved ids = resolver.source(column, column.source, output.rows);
    if (is_bag_of_one(column, ids)) column.pool = kNone;
    const Array& array = resolver.tensors[column.source.tensor];
    const int64_t inner = column.source.lane >= 0 ? ids.lanes : column.source.row1 >= 0 ? array.sizes[column.source.row1] : 1;
    Record r{};
    r.ids = resolver.values(column, ids.view, column.program_at, column.program_size, inner, false, image.steps);
    r.lanes = ids.lanes;
    r.dim = 1;
    r.index = column.index;
    r.next = r.extra = -1;
    r.flags = column.flags;
    r.pool = column.pool;
    r.masked = column.masked;
    r.padding = column.padding;
    r.out_dtype = uint8_t(out_dtype);
    r.out_word = resolver.words.output(column.output, output.data);
    r.out_offset = column.offset * out_size;
    r.out_stride = output.width * out_size;
    if (!column.has(kHasBag) && ids.rows != output.rows)
      refused("column %d has %lld rows, the output %lld", column.index, (long long)ids.rows, (long long)output.rows);
    bool wide = out_dtype == kDouble;
    if (column.extra >= 0) wide |= rare(column, ids, output.rows, r);
    if (column.table >= 0) wide |= table(column, r);
    r.flags |= wide ? kAccurate : 0;
    choose_kind(column, r);
    if (column.pool == kNone) choose_way(column, r, output.rows, alone);
    const int64_t width = (column.pool == kNone ? ids.lanes : 1) * r.dim;
    if (column.offset < 0 || column.offset + width > output.width)
      refused("column %d writes [%lld, %lld) of an output %lld wide", column.index, (long long)column.offset, (long long)(column.offset + width), (long long)output.width);
    return r;
  }

  // Parts of a row, a unit each: copies of wide rows, because a warp that moved 32 rows of 2 KB would take 32 turns for it, and
  // lanes that do not lie behind each other from row to row (H200, a cat of 26 lanes of 16 floats and 325 others at batch
  // 2048: 28.9 us before).
  std::vector<Record> pieces(const Record& r, int64_t rows) {
    if (r.kind == kRows && r.way == kAnyWay && r.lanes > 1 && r.lanes <= kMostPieces) return lanes_of(r, rows);
    if (r.way != kPosition) return {r};
    const int64_t count = std::min<int64_t>(kMostPieces, (r.chunks + kPiece - 1) / kPiece);
    std::vector<Record> found;
    for (int64_t p = 0; p < count; p++) {
      const int64_t first = r.chunks * p / count, end = r.chunks * (p + 1) / count;
      found.push_back(r);
      found.back().table += first * r.chunk_bytes;
      found.back().out_offset += first * r.chunk_bytes;
      set_chunks(found.back(), r.chunk_bytes, (end - first) * r.chunk_bytes);
    }
    return found;
  }

 private:
  // The lanes of a column by themselves, or the column as it is.
  std::vector<Record> lanes_of(const Record& r, int64_t rows) {
    const View& view = r.ids.view;
    std::vector<Record> found;
    if (view.inner) return {r};
    for (int64_t lane = 0; lane < r.lanes; lane++) {
      Record one = r;
      one.lanes = 1;
      one.lane = uint8_t(lane);
      one.out_offset += lane * r.dim * element_size(r.out_dtype);
      one.ids.view.offset += lane * view.lane_stride;
      one.ids.view.inner = 1;  // a row of one, whose first element a step adds
      if (!set_places(one, one.ids.view, rows)) return {r};
      one.ids.steps_at = int32_t(image.steps.size());
      for (int s = 0; s < r.ids.n_steps; s++) {
        Step step = image.steps[r.ids.steps_at + s];
        if (step.op == kAddTensor) step.tensor += lane * step.stride;
        image.steps.push_back(step);
      }
      one.way = way_of_ids(one);
      if (one.way == kAnyWay || one.way == kStagedBucketize) return {r};
      one.flags |= kFlat;
      found.push_back(one);
    }
    return found;
  }

  bool table(const Column& column, Record& r) {
    if (is_floating(r.ids.dtype)) refused("column %d: ids must be integers after the program", column.index);
    if (column.table >= resolver.n_tables) refused("column %d: no such table", column.index);
    const Array& array = resolver.tables[column.table];
    const bool quantized = array.dtype == kUInt8;
    if (array.dim != 2 || !(quantized || is_floating(array.dtype)))
      refused("column %d: a table must be 2-D of float16, bfloat16, float32 or float64, or of rows in 8 bits", column.index);
    if (quantized && (row_dim(array) < 0 || array.strides[1] != 1)) refused("column %d: expected rows of codes, a scale and an offset", column.index);
    const int size = element_size(array.dtype);
    r.table = array.data;
    r.table_rows = array.sizes[0];
    r.dim = row_dim(array);
    r.table_stride = array.strides[0] * size;
    r.column_stride = array.strides[1] * size;
    r.table_dtype = uint8_t(array.dtype);
    return array.dtype == kDouble;
  }

  // True when it brings fp64 weights.
  bool rare(const Column& column, const Resolved& ids, int64_t rows, Record& r) {
    const Extra& extra = resolver.plan.extras[column.extra];
    Rare e{};
    auto factor = [&](const Source& source, int64_t n, int64_t lanes) {
      const Resolved found = resolver.source(column, source, n);
      if (found.rows != n || found.lanes != lanes) refused("column %d: weights, lengths or divisor do not have the shape of the ids or rows", column.index);
      return found.view;
    };
    auto per_row = [&](const Source& source, int at, int size, bool counted) {
      return resolver.values(column, counted ? View{} : factor(source, rows, 1), at, size, 1, counted, image.steps);
    };
    e.masked_value = extra.masked_value;
    if (extra.weights.tensor >= 0) {
      e.weights = factor(extra.weights, ids.rows, ids.lanes);
      r.flags |= kHasWeights;
    }
    if (column.has(kCounted) || extra.divisor.tensor >= 0) {
      e.divisor = per_row(extra.divisor, extra.divisor_at, extra.divisor_size, column.has(kCounted));
      r.flags |= kDivides;
    }
    if (extra.lengths.tensor >= 0) {
      e.lengths = per_row(extra.lengths, extra.lengths_at, extra.lengths_size, false);
      r.flags |= kHasLengths;
    }
    if (column.has(kHasBag)) offsets(column, extra, ids.rows, rows, e);
    r.extra = int32_t(image.rares.size());
    image.rares.push_back(e);
    return extra.weights.tensor >= 0 && e.weights.dtype == kDouble;
  }

  void offsets(const Column& column, const Extra& extra, int64_t n_ids, int64_t rows, Rare& e) {
    const Array& array = resolver.tensor(column, extra.bag);
    if (array.dim != 1 || (array.dtype != kInt64 && array.dtype != kInt32)) refused("column %d: offsets must be a 1-D tensor of int32 or int64", column.index);
    if (array.sizes[0] - extra.include_last != rows * extra.segments) refused("column %d: its offsets have another number of bags than the output has rows", column.index);
    e.offsets_word = resolver.words.tensor(resolver.tensors, extra.bag);
    e.offsets_dtype = array.dtype;
    e.offsets_stride = array.strides[0] * element_size(array.dtype);
    if (n_ids > INT32_MAX) refused("column %d: more than 2^31 ids", column.index);
    e.segment = extra.segment;
    e.bounds_word = resolver.words.add(n_ids);
    resolver.words.add(array.sizes[0]);
  }

  // Whether rows.cuh serves the column, and how. Lanes that become further rows of the output count as rows.
  void choose_way(const Column& column, Record& r, int64_t rows, bool alone) {
    View view = r.ids.view;
    const int64_t size = r.dim * element_size(r.out_dtype);
    if (r.kind == kCopy) return choose_copy(r, rows, alone);
    if (r.kind != kRows) return;
    if (r.lanes != 1) {
      if (view.inner || r.out_stride != r.lanes * size) return;
      if (view.row_stride != r.lanes * view.lane_stride || resolver.adds(column)) view.inner = r.lanes, view.inner_stride = view.lane_stride;
      else view.row_stride = view.lane_stride;
    }
    if (!set_places(r, view, rows * r.lanes)) return;
    r.way = way_of_ids(r);
    if (r.way == kAnyWay) return;
    if (r.way == kStagedBucketize) {
      const Step& step = image.steps[r.ids.steps_at];
      r.edges = step.tensor;
      r.n_edges = step.n;
      r.edges_stride = int32_t(step.stride);
    }
    r.flags |= kFlat;
    if (r.lanes == 1) return;
    r.ids.view = view;
    r.out_stride = size;
  }

  // How ids that are loaded side by side are found; kAnyWay: each by itself.
  Way way_of_ids(const Record& r) const {
    const int dtype = r.ids.view.dtype;
    const bool integers = dtype == kInt64 || dtype == kInt32;
    if (!integers && dtype != kFloat) return kAnyWay;
    if (r.ids.n_steps != 1) return r.ids.n_steps ? kSteps : kNoSteps;
    const Step& step = image.steps[r.ids.steps_at];
    if (step.op == kBucketize && step.tensor_dtype == kFloat && step.n < kEdges) return kStagedBucketize;
    if (step.op == kRemainder && step.dtype == kInt64 && dtype == kInt64) return kLongRemainder;
    if (step.op == kCast && step.dtype == kInt64) return integers ? kNoSteps : kTruncate;
    if (step.op == kAddTensor && step.dtype == kInt64 && step.tensor_dtype == kInt64 && integers && r.places.inner) return kAddition;
    return kSteps;
  }

  // False: they are too far apart. `rows`: of the view, with its inner ones.
  static bool set_places(Record& r, const View& view, int64_t rows) {
    const int64_t step = view.inner ? std::gcd(view.row_stride, view.inner_stride) : view.row_stride;
    r.places = {int32_t(step), 0, 0, 0};
    if (step < 0 || step >= INT32_MAX) return false;
    if (view.inner == 0 || step == 0 || rows == 0) return true;
    const int64_t outer_step = view.row_stride / step, inner_step = view.inner_stride / step;
    if (std::max({view.inner, outer_step, inner_step}) > INT32_MAX) return false;
    r.places = {int32_t(step), uint32_t(view.inner), uint32_t(outer_step), uint32_t(inner_step)};
    return (rows / view.inner - 1) * outer_step + (view.inner - 1) * inner_step <= INT32_MAX;
  }

  // Whether its bags have one id each, always, so that what is pooled is a lookup.
  static bool is_bag_of_one(const Column& column, const Resolved& ids) {
    return !(column.flags & (kHasBag | kIsMasked | kHasPadding)) && column.extra < 0 && ids.lanes == 1;
  }

  static bool is_plain(const Record& r) {
    const View& view = r.ids.view;
    const int64_t stride = r.flags & kDense ? view.lane_stride : view.row_stride;
    const bool changed = r.ids.n_steps > 0 || (r.flags & (kHasLengths | kIsMasked | kHasPadding | kWrapNegative));
    return !changed && (view.dtype == kInt64 || view.dtype == kInt32) && stride < INT32_MAX && view.inner == 0;
  }

  // Integers, or floats that become int64, to which tensors in int64 are added, and which lanes may have to hold to count.
  bool is_stepped(const Record& r) const {
    const View& view = r.ids.view;
    if (view.inner || (view.dtype != kInt64 && view.dtype != kInt32 && view.dtype != kFloat)) return false;
    for (int s = 0; s < r.ids.n_steps; s++) {
      const Step& step = image.steps[r.ids.steps_at + s];
      const bool casts = step.op == kCast && step.dtype == kInt64 && s == 0;
      const bool adds = step.op == kAddTensor && step.dtype == kInt64 && step.tensor_dtype == kInt64;
      if (!casts && ((s == 0 && view.dtype == kFloat) || !(adds || step.op == kKeep))) return false;
    }
    return true;
  }

  bool has_plain_weights(const Record& r) const {
    const View& view = image.rares[r.extra].weights;
    return r.table_dtype != kUInt8 && (view.dtype == kFloat || view.dtype == kHalf || view.dtype == kBFloat16) && view.inner == 0;
  }

  // A copy of rows as they are reads them as a table's, at the ids 0, 1, 2...
  void choose_copy(Record& r, int64_t rows, bool alone) {
    const View& view = r.ids.view;
    const int64_t size = element_size(r.out_dtype), row_bytes = r.lanes * size;
    const bool changed = r.ids.n_steps > 0 || view.dtype != r.out_dtype || (r.flags & (kAdd | kDivides));
    if (changed || (r.lanes != 1 && view.lane_stride != size) || r.out_stride >= INT32_MAX || !set_places(r, view, rows)) return;
    const int64_t data = resolver.words.values[view.word] + view.offset, bits = data | r.places.step | row_bytes | r.out_stride | output_bits(r);
    const int64_t chunk_bytes = bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 2;
    if (row_bytes / chunk_bytes >= (alone ? kMostPieces : 1) * kMostChunks) return;
    r.way = kPosition;
    r.flags |= kFlat;
    r.table = reinterpret_cast<const char*>(view.offset);
    r.table_stride = r.places.step;
    set_chunks(r, chunk_bytes, row_bytes);
    r.lanes = 1;
  }

  int64_t output_bits(const Record& r) const { return resolver.words.values[r.out_word] + r.out_offset; }

  static void set_chunks(Record& r, int64_t chunk_bytes, int64_t row_bytes) {
    const int64_t chunks = row_bytes / chunk_bytes;
    r.chunk_bytes = uint8_t(chunk_bytes);
    r.chunks = uint32_t(chunks);
    r.chunk_magic = chunks > 1 ? uint32_t((uint64_t(1) << 32) / chunks + ((uint64_t(1) << 32) % chunks != 0)) : 0;
  }

  // By 16 bytes of a row where that is possible, by as many elements where it is not; the rest is pool_any's.
  static Kind bag_kind(const Record& r, bool contiguous, bool in_chunks) {
    const bool floats = r.table_dtype == kFloat, simple = r.pool != kMax || (floats && (r.flags & kPlain));
    if (!contiguous || !simple || (r.flags & kAccurate) || r.dim == 0 || r.table_stride >= INT32_MAX) return kBagsAny;
    return in_chunks ? kBags : floats ? kLooseBags : kBagsAny;
  }

  // The widest chunks that fit a row, its table and its place in the output, and the way that uses them.
  void choose_kind(const Column& column, Record& r) {
    const int size = column.table < 0 ? element_size(r.out_dtype) : element_size(r.table_dtype);
    const bool contiguous = r.column_stride == size || r.dim == 1, bags = column.pool != kNone;
    const bool plain = r.table_dtype == r.out_dtype && !(r.flags & (kAdd | kDivides));
    if (bags && (r.table_rows > INT32_MAX || r.lanes > INT32_MAX)) refused("column %d: more than 2^31 rows or ids a bag", column.index);
    if (bags && !column.has(kHasBag)) {
      r.flags |= kDense;
      if (column.pool == kMax && r.lanes == 0) refused("column %d: max over no ids", column.index);
    }
    auto fits = [&](int64_t bytes) {
      return r.dim * size % bytes == 0 && reinterpret_cast<int64_t>(r.table) % bytes == 0 && r.table_stride % bytes == 0;
    };
    auto fits_output = [&](int64_t bytes) {
      const auto out = reinterpret_cast<int64_t>(outputs[column.output].data);
      return out % bytes == 0 && r.out_offset % bytes == 0 && r.out_stride % bytes == 0;
    };
    if (column.table < 0) {
      r.kind = kCopy;
    } else if (bags) {
      if (is_plain(r)) r.flags |= !(r.flags & kHasWeights) ? kPlain : has_plain_weights(r) ? kWeighted : 0;
      if (is_stepped(r)) r.flags |= kStepped;
      r.kind = bag_kind(r, contiguous, fits(16));
      r.chunks = uint32_t((r.dim * size + 15) / 16);
      while ((1u << r.group_log2) < r.chunks && r.group_log2 < 5) r.group_log2++;
      r.chunk_bytes = plain && r.kind == kBags && fits_output(16) ? 16 : 0;
    } else {
      const int64_t bytes = fits(16) && fits_output(16) ? 16 : fits(4) && fits_output(4) ? 4 : 2, chunks = r.dim * size / bytes;
      const bool narrow = r.table_rows < INT32_MAX && r.table_stride < INT32_MAX && r.out_stride < INT32_MAX && chunks < kMostChunks;
      r.kind = plain && contiguous && chunks > 0 && narrow ? kRows : kConvert;
      set_chunks(r, bytes, r.dim * size);
      while ((int64_t(1) << r.group_log2) < r.dim && r.group_log2 < 5) r.group_log2++;
      const bool widens = r.table_dtype == kUInt8 && r.out_dtype == kFloat && !(r.flags & (kAdd | kDivides)) && r.dim > 0 && r.dim / 4 < kMostChunks;
      if (column.table >= 0 && widens && narrow && fits(4) && fits_output(16)) {
        r.kind = kRows;
        set_chunks(r, 4, r.dim);
        r.chunk_bytes = kCodes;
      }
    }
  }
};

}  // namespace fxopt::cuda
