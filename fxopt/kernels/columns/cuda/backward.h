// The host side of gradients: entries of all columns of a call, and their sums by row.
#pragma once
#include "host.h"

namespace fxopt::cuda {

__global__ void entries_kernel(const __grid_constant__ Launch launch);
struct Sums;

// Records of columns from `next` on, as many as a launch has room for, with the place of their entries.
struct Spans : Columns {
  int64_t longest = 0;

  Spans(const Request& request, const OutputData* outputs) : Columns(request, outputs) {}

  Image build(int& next, int64_t& total) {
    const Plan& plan = resolver.plan;
    for (; next < plan.header->n_columns && resolver.words.values.size() + 16 < kWords; next++) {
      const Column& column = plan.columns[next];
      const Record r = record(column);
      const bool bag = column.has(kHasBag);
      const int64_t rows = outputs[column.output].rows, count = bag ? resolver.words.values[image.rares[r.extra].bounds_word] : rows * fxopt::lanes_of(resolver, column.source);
      const int64_t frozen = column.has(kHasFrozen) ? plan.extras[column.extra].frozen : -1;
      if (count >= INT32_MAX) refused("column %d: more than 2^31 ids", column.index);
      image.records.push_back(r);
      image.spans.push_back({total, count, rows, frozen, int32_t(column.table), 0});
      longest = std::max(longest, count);
      total += count;
    }
    image.items = int64_t(image.records.size());
    return std::move(image);
  }

  void add_entries(Image& to, char* keys, char* from, char* scales) {
    to.entries_word = int32_t(resolver.words.values.size());
    for (const char* pointer : {keys, from, scales}) resolver.words.add(reinterpret_cast<int64_t>(pointer));
    to.words = std::move(resolver.words.values);
  }
};

// Allocates and fills keys int64, addresses int64 and factors float32 of all entries. `grads`: one for each output.
inline void entries(const Request& request, const Array* grads, cudaStream_t stream, int index) {
  const Plan plan = checked_plan(request);
  Device& device = device_of(index);
  const bool capturing = is_captured(stream);
  std::vector<OutputData> outputs;
  for (int64_t o = 0; o < plan.header->n_outputs; o++) {
    const Array& grad = grads[o];
    // As torch says it: the strides of dims of one element, and of nothing at all, are any.
    const bool dense = grad.dim == 2 && (grad.sizes[0] * grad.sizes[1] == 0 || ((grad.sizes[1] == 1 || grad.strides[1] == 1) && (grad.sizes[0] == 1 || grad.strides[0] == grad.sizes[1])));
    if (!dense || grad.dtype != kFloat) refused("fxopt.columns: gradients must be contiguous [rows, width] in float32");
    outputs.push_back({grad.data, grad.sizes[0], grad.sizes[1]});
  }
  std::vector<std::unique_ptr<Spans>> parts;
  std::vector<Image> images;
  int64_t total = 0;
  for (int next = 0; next < plan.header->n_columns;) {
    parts.push_back(std::make_unique<Spans>(request, outputs.data()));
    images.push_back(parts.back()->build(next, total));
  }
  char* keys = request.output({1, total}, kInt64);
  char* from = request.output({1, total}, kInt64);
  char* scales = request.output({1, total}, kFloat);
  for (size_t k = 0; k < images.size(); k++) {
    if (parts[k]->longest == 0) continue;
    parts[k]->add_entries(images[k], keys, from, scales);
    const int64_t blocks = std::min<int64_t>((parts[k]->longest + 255) / 256, 1024);
    const Launch& parameters = parameters_of(device, request, images[k], stream, capturing);
    check_launched(launch_with(nullptr, entries_kernel, dim3(unsigned(blocks), unsigned(images[k].records.size())), 256, 0, stream, parameters));
  }
}

}  // namespace fxopt::cuda
