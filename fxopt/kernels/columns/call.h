// What one call hands to the work items, and how they report what is wrong.
#pragma once
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <utility>

#include "../simd/cpu.h"
#include "../refused.h"
#include "layout.h"

namespace fxopt {

// The first problem of a work item. Bad ids carry numbers, so that Python can name the column and the table.
struct Error {
  int64_t column = INT64_MAX, row = 0;
  char text[256] = "";

  bool fail(int64_t at_column, int64_t at_row, const char* format, ...) __attribute__((format(printf, 4, 5))) {
    column = at_column;
    row = at_row;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    return false;
  }
  bool failed() const { return text[0] != 0; }
  bool before(const Error& other) const { return column != other.column ? column < other.column : row < other.row; }
};

// Tables that are smaller together stay in L2, where a prefetch only costs. Each of many small ones does not: 100 x 1000
// x 16 with fresh ids take 150-180 ns an id without, and 45 with.
constexpr double kCached = 256 * 1024;

inline bool outgrow_cache(const Array* tables, int64_t n) {
  double bytes = 0;
  for (int64_t t = 0; t < n && bytes <= kCached; t++)
    if (tables[t].dim == 2) bytes += double(tables[t].sizes[0]) * double(tables[t].sizes[1]) * element_size(tables[t].dtype);
  return bytes > kCached;
}

struct Call : Given {
  const OutputData* outputs;
  char* (*scratch)(size_t bytes);  // per thread, grows, valid until the next request
  bool fetches_ahead;
};

// What one id of a column gives to its table's gradient: scale * the numbers at `from`.
struct Entry {
  int64_t id;
  const char* from;
  double scale;
  int32_t dtype, unused;
};

struct Entries {
  Entry* data;
  int64_t n, capacity;  // n may say more than there is room for
};

// One instruction set's kernels. Those of a bool return false and fill `error` when something is wrong.
struct Kernels {
  // Rows [row0, row1) of the columns of a tile.
  bool (*run_tile)(const Call&, const Tile&, int64_t row0, int64_t row1, Error&);
  // Adds a column's share to rows [begin, end) of its table's gradient; the outputs hold their gradients.
  bool (*run_scatter)(const Call&, int column, char* out, int64_t begin, int64_t end, Error&);
  // The same as entries, in the order of the ids' positions.
  bool (*run_list)(const Call&, int column, Entries&, int64_t begin, int64_t end, Error&);
  // Sums of entries that are sorted by id: the rows, and their gradients [rows, dim] of `dtype`.
  void (*sum_entries)(const Entries&, int dtype, int64_t dim, int64_t* rows, char* values);
};

FXOPT_IN_EACH(const Kernels kernels)

}  // namespace fxopt
