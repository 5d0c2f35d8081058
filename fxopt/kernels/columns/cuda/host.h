// The host side of a launch of columns.
#pragma once
#include "device.h"

namespace fxopt::cuda {

__global__ void columns_kernel(const __grid_constant__ Launch launch);
__global__ void block_columns_kernel(const __grid_constant__ Launch launch);
__global__ void joins_of_bags_kernel(const __grid_constant__ Launch launch);

inline void launch(Device& device, const Request& request, const Image& image, cudaStream_t stream, bool capturing) {
  if (image.items + image.tiles == 0) return;
  // As many blocks as run at once, so that warps move through a table together.
  const int64_t most = int64_t(device.processors) * kBlocks, blocks = (image.items + kWarps - 1) / kWarps;
  Launch& parameters = parameters_of(device, request, image, stream, capturing);
  int64_t cut = 0;  // bags
  for (int s = 0; s < parameters.n_segments; s++) {
    Segment& segment = parameters.segments[s];
    if (segment.part_stride == 0) continue;
    const int64_t bags = segment.rows * segment.units;
    segment.sums = request.floats({bags * segment.parts, segment.part_stride});
    cut += bags;
  }
  const auto kernel = image.in_blocks ? block_columns_kernel : columns_kernel;
  const dim3 all(unsigned(image.tiles ? blocks + image.tiles : std::min(most, blocks)));
  check_launched(fxopt::launch(kernel, all, kWarps * 32, stream, parameters));
  const dim3 of_cut(unsigned(std::min(most, (cut + kWarps - 1) / kWarps)));
  check_launched(fxopt::launch(joins_of_bags_kernel, of_cut, kWarps * 32, stream, parameters));
}

inline void run(const Request& request, cudaStream_t stream, int index) {
  const Plan plan = checked_plan(request);
  Device& device = device_of(index);
  const bool captured = captures(device, stream);
  std::vector<OutputData> outputs;
  for (int64_t o = 0; o < plan.header->n_outputs; o++) {
    outputs.push_back(measure(given_of(request), plan.outputs[o]));
    outputs[o].data = request.output({outputs[o].rows, outputs[o].width}, plan.outputs[o].dtype);
  }
  for (int next = 0; next < plan.header->n_columns;)
    launch(device, request, Builder(request, outputs.data(), device.processors * 32).build(next), stream, captured);
  wait_if_blocking(device, stream, captured);
}

}  // namespace fxopt::cuda

// Launches a call on `stream` of the current device. False: `text` (256 bytes) says what is wrong. What it allocates
// after the outputs is scratch, to be freed in stream order.
FXOPT_EXPORT bool fxopt_cuda_columns(const fxopt::Request* request, void* stream, int device, char* text) {
  return fxopt::done(text, [&] { fxopt::cuda::run(*request, static_cast<cudaStream_t>(stream), device); });
}
