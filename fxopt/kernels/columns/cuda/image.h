// One call as records, in the order in which the device works: heavy columns first.
#pragma once
#include <algorithm>
#include <map>
#include <tuple>

#include "resolve.h"

namespace fxopt::cuda {

struct Image {
  std::vector<Record> records;
  std::vector<Rare> rares;
  std::vector<Step> steps;
  std::vector<Segment> segments;
  std::vector<int64_t> words;
  int64_t items = 0, heavy = 0;  // heavy ones, of bags, are the first
};

struct OutputShape {
  int64_t rows, width;
};

// As cpu.cpp's measure(): rows and width of an output, from the column that the plan names.
inline OutputShape measure(const Request& request, const Plan& plan, const Output& output) {
  const Column& column = plan.columns[output.measured];
  auto size = [&](int64_t tensor, int64_t dim) {
    if (tensor < 0 || tensor >= request.n_tensors || dim < 0 || dim >= request.tensors[tensor].dim)
      fail("column %d: no dim %lld of tensor %lld", column.index, (long long)dim, (long long)tensor);
    return request.tensors[tensor].sizes[dim];
  };
  OutputShape shape{0, output.width};
  if (column.has(kHasBag)) {
    const Extra& extra = plan.extras[column.extra];
    shape.rows = (size(extra.bag, 0) - extra.include_last) / extra.segments;
    if (shape.rows < 0) fail("column %d: an empty offsets tensor", column.index);
  } else {
    shape.rows = size(column.source.tensor, column.source.row0);
    if (column.source.row1 >= 0) shape.rows *= size(column.source.tensor, column.source.row1);
  }
  if (shape.width >= 0) return shape;
  int64_t lanes = 1;
  if (column.pool == kNone && column.source.lane >= 0)
    lanes = column.source.length >= 0 ? column.source.length : size(column.source.tensor, column.source.lane) - column.source.start;
  if (column.table >= request.n_tables) fail("column %d: no such table", column.index);
  shape.width = lanes * (column.table < 0 ? 1 : request.tables[column.table].sizes[1]);
  return shape;
}

// Writes columns from `next` on into one image, as many as a launch has room for.
struct Builder {
  Resolver resolver;
  const OutputData* outputs;
  int warps;  // that the device runs at once
  Image image;

  Builder(const Request& request, const OutputData* outputs, int warps) : resolver(request), outputs(outputs), warps(warps) {}

  Image build(int& next) {
    const Plan& plan = resolver.plan;
    std::map<std::tuple<int, int64_t, int64_t>, std::vector<std::vector<Record>>> classes;  // (-width, rows, positions)
    while (next < plan.header->n_columns && int(classes.size()) < kSegments) {
      const int end = slot_end(next);
      size_t words = resolver.words.values.size();
      for (int c = next; c < end; c++) words += 8;
      if (words > kWords) {
        if (classes.empty()) fail("column %d: its slot needs more tensors than a launch carries", plan.columns[next].index);
        break;
      }
      std::vector<Record> chain;
      for (int c = next; c < end; c++) chain.push_back(record(plan.columns[c]));
      const OutputData& output = outputs[plan.columns[next].output];
      next = end;
      const int width = output.rows ? bag_width(chain, output.rows) : 0;
      const int64_t positions = output.rows * chain[0].lanes;
      if (width || positions) classes[{-width, output.rows, width ? 0 : positions}].push_back(std::move(chain));
    }
    int64_t light = 0;
    for (auto& [key, units] : classes)
      if (std::get<0>(key) == 0) light += int64_t(units.size()) * ((std::get<2>(key) + 31) / 32);
    for (auto& [key, units] : classes) add_segment(-std::get<0>(key), std::get<1>(key), std::get<2>(key), light, units);
    image.words = std::move(resolver.words.values);
    return std::move(image);
  }

 private:
  // Where the columns of the slot of column `first` end: a plan tensor holds them side by side, in plan order.
  int slot_end(int first) const {
    const Column* columns = resolver.plan.columns;
    int end = first + 1;
    while (end < resolver.plan.header->n_columns && columns[end].output == columns[first].output && columns[end].offset == columns[first].offset) end++;
    return end;
  }

  // Lanes of a warp that share a bag, 0 where the unit's columns have no bags.
  int bag_width(const std::vector<Record>& chain, int64_t rows) const {
    bool bags = false, lanes = false;
    for (const Record& r : chain) bags |= r.kind == kBags || r.kind == kBagsAny, lanes |= r.lanes != chain[0].lanes;
    if (!bags) return lanes ? 32 : 0;
    if (chain.size() > 1 || chain[0].kind == kBagsAny) return 32;
    const Record& r = chain[0];
    const int64_t ids = r.flags & kDense ? r.lanes * rows : resolver.words.values[image.rares[r.extra].bounds_word];
    int width = std::max(4, 1 << r.group_log2);
    while (width < 32 && width * rows < ids) width *= 2;
    return width;
  }

  void add_segment(int width, int64_t rows, int64_t positions, int64_t light, std::vector<std::vector<Record>>& units) {
    Segment segment{rows, positions, int32_t(image.items), int32_t(image.records.size()), int32_t(units.size()), width};
    int64_t per_unit;
    if (width) {
      per_unit = (rows + 32 / width - 1) / (32 / width);
    } else {
      if (positions > UINT32_MAX - 256) fail("fxopt.columns: more than 2^32 positions in a column");
      segment.span = 32;
      while (segment.span < 256 && light / (segment.span / 32) > warps / 2) segment.span *= 2;
      per_unit = (positions + segment.span - 1) / segment.span;
    }
    image.items += per_unit * int64_t(units.size());
    if (width) image.heavy = image.items;
    if (image.items > INT32_MAX) fail("fxopt.columns: a call of more than 2^31 work items");
    image.segments.push_back(segment);
    const size_t heads = image.records.size();
    for (auto& chain : units) image.records.push_back(chain[0]);
    for (size_t u = 0; u < units.size(); u++) {
      size_t last = heads + u;
      for (size_t k = 1; k < units[u].size(); k++) {
        image.records[last].next = int32_t(image.records.size());
        last = image.records.size();
        image.records.push_back(units[u][k]);
      }
    }
  }

  Record record(const Column& column) {
    const Plan& plan = resolver.plan;
    const OutputData& output = outputs[column.output];
    const int out_dtype = plan.outputs[column.output].dtype, out_size = bytes_of(out_dtype);
    const Resolved ids = resolver.source(column, column.source, output.rows);
    const Array& array = resolver.request.tensors[column.source.tensor];
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
      fail("column %d has %lld rows, the output %lld", column.index, (long long)ids.rows, (long long)output.rows);
    bool wide = out_dtype == kDouble;
    if (column.extra >= 0) wide |= rare(column, ids, output.rows, r);
    if (column.table >= 0) wide |= table(column, r);
    r.flags |= wide ? kAccurate : 0;
    choose_kind(column, r);
    if (column.pool == kNone) choose_way(r);
    const int64_t width = (column.pool == kNone ? ids.lanes : 1) * r.dim;
    if (column.offset < 0 || column.offset + width > output.width)
      fail("column %d writes [%lld, %lld) of an output %lld wide", column.index, (long long)column.offset, (long long)(column.offset + width), (long long)output.width);
    return r;
  }

  bool table(const Column& column, Record& r) {
    if (floats(r.ids.dtype)) fail("column %d: ids must be integers after the program", column.index);
    if (column.table >= resolver.request.n_tables) fail("column %d: no such table", column.index);
    const Array& array = resolver.request.tables[column.table];
    if (array.dim != 2 || !floats(array.dtype)) fail("column %d: a table must be 2-D of float16, bfloat16, float32 or float64", column.index);
    const int size = bytes_of(array.dtype);
    r.table = array.data;
    r.table_rows = array.sizes[0];
    r.dim = array.sizes[1];
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
      if (found.rows != n || found.lanes != lanes) fail("column %d: weights, lengths or divisor do not have the shape of the ids or rows", column.index);
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
    if (array.dim != 1 || (array.dtype != kInt64 && array.dtype != kInt32)) fail("column %d: offsets must be a 1-D tensor of int32 or int64", column.index);
    if (array.sizes[0] - extra.include_last != rows * extra.segments) fail("column %d: its offsets have another number of bags than the output has rows", column.index);
    e.offsets_word = resolver.words.tensor(resolver.request, extra.bag);
    e.offsets_dtype = array.dtype;
    e.offsets_stride = array.strides[0] * bytes_of(array.dtype);
    if (n_ids > INT32_MAX) fail("column %d: more than 2^31 ids", column.index);
    e.segment = extra.segment;
    e.bounds_word = resolver.words.add(n_ids);
    resolver.words.add(array.sizes[0]);
  }

  // Whether rows.cuh serves the column, and how. Lanes that lie as further rows would count as rows.
  void choose_way(Record& r) {
    View& view = r.ids.view;
    const int64_t size = r.dim * bytes_of(r.out_dtype);
    if (r.kind == kCopy) return choose_copy(r);
    const bool lies_as_rows = r.lanes == 1 || (view.row_stride == r.lanes * view.lane_stride && r.out_stride == r.lanes * size);
    if (r.kind != kRows || view.inner || !lies_as_rows || (r.flags & kWrapNegative)) return;
    const Step* step = image.steps.data() + r.ids.steps_at;
    const bool whole = view.dtype == kInt64 || view.dtype == kInt32;
    if (r.ids.n_steps == 0 && whole) {
      r.way = kNoSteps;
    } else if (r.ids.n_steps == 1 && step->op == kBucketize && step->tensor_dtype == kFloat && step->n < kEdges) {
      r.way = kStagedBucketize;
      r.edges = step->tensor;
      r.n_edges = step->n;
      r.edges_stride = int32_t(step->stride);
    } else if (r.ids.n_steps == 1 && step->op == kRemainder && step->dtype == kInt64 && view.dtype == kInt64) {
      r.way = kLongRemainder;
    } else {
      return;
    }
    r.flags |= kFlat;
    if (r.lanes == 1) return;
    view.row_stride = view.lane_stride;
    r.out_stride = size;
  }

  static bool is_plain(const Record& r) {
    const View& view = r.ids.view;
    const int64_t size = bytes_of(view.dtype), stride = r.flags & kDense ? view.lane_stride : view.row_stride;
    const bool changed = r.ids.n_steps > 0 || (r.flags & (kHasWeights | kHasLengths | kIsMasked | kHasPadding | kWrapNegative));
    return !changed && (view.dtype == kInt64 || view.dtype == kInt32) && stride == size && view.inner == 0;
  }

  // A copy of rows as they are reads them as a table's, at the ids 0, 1, 2...
  void choose_copy(Record& r) {
    const View& view = r.ids.view;
    const int64_t size = bytes_of(r.out_dtype);
    const bool changed = r.ids.n_steps > 0 || view.dtype != r.out_dtype || (r.flags & (kAdd | kDivides));
    if (changed || view.inner || (r.lanes != 1 && view.lane_stride != size) || r.lanes * size / 2 > 8192) return;
    const int64_t data = resolver.words.values[view.word] + view.offset, bits = data | view.row_stride | r.lanes * size | r.out_stride | output_bits(r);
    if (view.row_stride >= INT32_MAX || r.out_stride >= INT32_MAX || (size == 8 && bits % 16)) return;
    r.way = kPosition;
    r.flags |= kFlat;
    r.table = reinterpret_cast<const char*>(view.offset);
    r.table_stride = view.row_stride;
    set_chunks(r, bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 2, r.lanes * size);
    r.lanes = 1;
  }

  int64_t output_bits(const Record& r) const { return resolver.words.values[r.out_word] + r.out_offset; }

  static void set_chunks(Record& r, int64_t chunk_bytes, int64_t row_bytes) {
    const int64_t chunks = row_bytes / chunk_bytes;
    r.chunk_bytes = uint8_t(chunk_bytes);
    r.chunks = uint32_t(chunks);
    r.chunk_magic = chunks > 1 ? uint32_t((uint64_t(1) << 32) / chunks + ((uint64_t(1) << 32) % chunks != 0)) : 0;
  }

  // The widest chunks that fit a row, its table and its place in the output, and the way that uses them.
  void choose_kind(const Column& column, Record& r) {
    const int size = column.table < 0 ? bytes_of(r.out_dtype) : bytes_of(r.table_dtype);
    const bool contiguous = r.column_stride == size || r.dim == 1, bags = column.pool != kNone;
    const bool plain = r.table_dtype == r.out_dtype && !(r.flags & (kAdd | kDivides));
    if (bags && (r.table_rows > INT32_MAX || r.lanes > INT32_MAX)) fail("column %d: more than 2^31 rows or ids a bag", column.index);
    if (bags && !column.has(kHasBag)) {
      r.flags |= kDense;
      if (column.pool == kMax && r.lanes == 0) fail("column %d: max over no ids", column.index);
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
      const bool fast = contiguous && column.pool != kMax && !(r.flags & kAccurate) && r.dim > 0 && fits(16);
      r.kind = fast ? kBags : kBagsAny;
      r.flags |= is_plain(r) ? kPlain : 0;
      r.chunks = uint32_t(r.dim * size / 16);
      while ((1u << r.group_log2) < r.chunks && r.group_log2 < 5) r.group_log2++;
      r.chunk_bytes = plain && fits_output(16) ? 16 : 0;
    } else {
      const int64_t bytes = fits(16) && fits_output(16) ? 16 : fits(4) && fits_output(4) ? 4 : 2, chunks = r.dim * size / bytes;
      const bool narrow = r.table_rows < INT32_MAX && r.table_stride < INT32_MAX && r.out_stride < INT32_MAX && chunks < 8192;
      r.kind = plain && contiguous && chunks > 0 && narrow ? kRows : kConvert;
      set_chunks(r, bytes, r.dim * size);
    }
  }
};

}  // namespace fxopt::cuda
