// What a device keeps for the launches on it: images, launch parameters, and what it reported.
#pragma once
#include <cuda_runtime.h>

#include <cstdio>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "../../abi.h"
#include "../../early.cuh"
#include "image.h"

namespace fxopt::cuda {

constexpr size_t kKeptBytes = 64 << 20;  // of images; more of them are uploaded for one call at a time

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) refused("fxopt.columns: %s: %s", what, cudaGetErrorString(error));
}

inline void check_launched(const char* wrong) {
  if (wrong) refused("fxopt.columns: launch: %s", wrong);
}

// Allows what a capture in this thread forbids by default: allocation, and waiting for a stream of our own.
struct Relaxed {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  Relaxed() { check(cudaThreadExchangeStreamCaptureMode(&mode), "capture mode"); }
  ~Relaxed() { cudaThreadExchangeStreamCaptureMode(&mode); }
};

struct Kept {
  std::string bytes;
  char* device;
};
using KeptPointer = std::unique_ptr<Kept>;

struct Device {
  int index, processors = 0;
  Errors* errors = nullptr;    // on the device
  Failure* report = nullptr;   // on the host, which the device can write
  cudaStream_t stream = nullptr;
  size_t kept_bytes = 0;
  std::unordered_map<size_t, std::vector<KeptPointer>> images;     // by their bytes' hash
  std::unordered_map<const int64_t*, const Kept*> recent;           // by the plan's address: most calls repeat the last
  std::mutex mutex;

  explicit Device(int index) : index(index) {
    Relaxed relaxed;
    check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, index), "multiprocessors");
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    check(cudaHostAlloc(reinterpret_cast<void**>(&report), sizeof(Failure), cudaHostAllocMapped | cudaHostAllocPortable), "host memory");
    memset(report, 0, sizeof *report);
    check(cudaMalloc(reinterpret_cast<void**>(&errors), sizeof(Errors)), "device memory");
    Errors first{};
    check(cudaHostGetDevicePointer(reinterpret_cast<void**>(&first.report), report, 0), "mapped memory");
    upload(errors, &first, sizeof first);
  }

  void upload(void* to, const void* from, size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), "upload");
    check(cudaStreamSynchronize(stream), "upload");
  }

  // Where these bytes are on the device for good; null when the room for that is used up and nobody captures.
  const char* keep(const int64_t* plan, const std::string& bytes, bool capturing) {
    std::lock_guard<std::mutex> lock(mutex);
    const Kept*& last = recent[plan];
    if (last && last->bytes == bytes) return last->device;
    auto& same_hash = images[std::hash<std::string>()(bytes)];
    for (const KeptPointer& kept : same_hash)
      if (kept->bytes == bytes) return (last = kept.get())->device;
    if (kept_bytes + bytes.size() > kKeptBytes && !capturing) return nullptr;
    Relaxed relaxed;
    char* device;
    check(cudaMalloc(reinterpret_cast<void**>(&device), bytes.size()), "device memory");
    upload(device, bytes.data(), bytes.size());
    same_hash.push_back(std::make_unique<Kept>(Kept{bytes, device}));
    kept_bytes += bytes.size();
    return (last = same_hash.back().get())->device;
  }
};

struct Devices {
  std::unordered_map<int, std::unique_ptr<Device>> known;
  std::mutex mutex;
};
inline Devices& devices() {
  static Devices all;
  return all;
}

// The current device, whose number is `index`.
inline Device& device_of(int index) {
  std::lock_guard<std::mutex> lock(devices().mutex);
  auto& device = devices().known[index];
  if (!device) device = std::make_unique<Device>(index);
  return *device;
}

// A device that need not be the current one; null where nothing was launched on it.
inline Device* known_device(int index) {
  std::lock_guard<std::mutex> lock(devices().mutex);
  const auto found = devices().known.find(index);
  return found == devices().known.end() ? nullptr : found->second.get();
}

// What launches of this thread say of their rows: see Launch.
inline thread_local const int64_t* real_rows = nullptr;
inline thread_local int64_t capacity = 0;
inline bool blocking = false;  // wait for every launch, as CUDA_LAUNCH_BLOCKING=1 asks

template <class T>
inline size_t append(std::string& bytes, const std::vector<T>& items) {
  bytes.resize((bytes.size() + 15) / 16 * 16);
  const size_t at = bytes.size();
  bytes.append(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(T));
  return at;
}

// What a kernel gets; valid until the next call in this thread.
inline Launch& parameters_of(Device& device, const Request& request, const Image& image, cudaStream_t stream, bool capturing) {
  std::string bytes;
  bytes.reserve(image.records.size() * sizeof(Record) + image.rares.size() * sizeof(Rare) + image.steps.size() * sizeof(Step) + 64);
  const size_t records = append(bytes, image.records), rares = append(bytes, image.rares), steps = append(bytes, image.steps), spans = append(bytes, image.spans);
  bytes.resize(bytes.size() + 16);
  const char* data = device.keep(request.words, bytes, capturing);
  if (!data) {
    char* scratch = request.output({1, int64_t(bytes.size())}, kUInt8);
    check(cudaMemcpyAsync(scratch, bytes.data(), bytes.size(), cudaMemcpyHostToDevice, stream), "upload");
    data = scratch;
  }
  thread_local Launch parameters;
  parameters.records = reinterpret_cast<const Record*>(data + records);
  parameters.rares = reinterpret_cast<const Rare*>(data + rares);
  parameters.steps = reinterpret_cast<const Step*>(data + steps);
  parameters.spans = reinterpret_cast<const Span*>(data + spans);
  parameters.entries_word = image.entries_word;
  parameters.errors = device.errors;
  parameters.real_rows = real_rows;
  parameters.capacity = capacity;
  parameters.plan = request.n_words;
  parameters.mode = int32_t(reinterpret_cast<const Header*>(request.words)->bad_ids);
  parameters.items = int32_t(image.items);
  parameters.in_blocks = int32_t(image.in_blocks);
  parameters.tiles = int32_t(image.tiles);
  parameters.n_segments = int32_t(image.segments.size());
  std::copy(image.segments.begin(), image.segments.end(), parameters.segments);
  std::copy(image.words.begin(), image.words.end(), parameters.words);
  return parameters;
}

inline std::string describe(const Failure& f) {
  char text[256];
  if (f.kind == kBadId)
    snprintf(text, sizeof text, "fxopt-bad-id column=%d row=%lld lane=%lld value=%lld rows=%lld plan=%lld", f.column, (long long)f.row,
             (long long)f.lane, (long long)f.value, (long long)f.rows, (long long)f.plan);
  else if (f.kind == kBadLength)
    snprintf(text, sizeof text, "fxopt-late fxopt.jagged_offsets: expected lengths of at least 0, found %lld at %lld", (long long)f.value, (long long)f.row);
  else if (f.kind == kBadTotal)
    snprintf(text, sizeof text, "fxopt-late fxopt.jagged_offsets: lengths of %lld ids in all, found %lld", (long long)f.value, (long long)f.rows);
  else
    snprintf(text, sizeof text, "fxopt-late column %d: offsets of bag %lld are [%lld, %lld), expected them to start at 0, to grow and to stay within the ids",
             f.column, (long long)f.row, (long long)f.value, (long long)f.rows);
  return text;
}

// Takes the failure that the device reported, "" for none. Waits for the device only when there is one.
inline std::string take(Device& device) {
  if (reinterpret_cast<volatile Failure*>(device.report)->kind == 0) return "";
  check(cudaDeviceSynchronize(), "synchronize");
  const std::string text = describe(*device.report);
  memset(device.report, 0, sizeof *device.report);
  const unsigned long long none = 0;
  device.upload(&device.errors->key, &none, sizeof none);
  return text;
}

inline void raise(Device& device) {
  const std::string text = take(device);
  if (!text.empty()) throw std::runtime_error(text);
}

inline Plan checked_plan(const Request& request) {
  check_counts(request.words, request.n_words);
  const Plan plan(request.words);
  for (int64_t c = 0; c < plan.header->n_columns; c++)
    if (plan.columns[c].has(kHasBag) && plan.columns[c].pool == kNone) refused("column %d: expected features that are pooled", plan.columns[c].index);
  return plan;
}

inline bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  check(cudaStreamIsCapturing(stream, &status), "stream");
  return status != cudaStreamCaptureStatusNone;
}

// Whether `stream` is being captured; if not, what an earlier call reported is raised.
inline bool captures(Device& device, cudaStream_t stream) {
  if (is_captured(stream)) return true;
  raise(device);
  return false;
}

// Where every launch is waited for.
inline void wait_if_blocking(Device& device, cudaStream_t stream, bool captured) {
  if (!blocking || captured) return;
  check(cudaStreamSynchronize(stream), "synchronize");
  raise(device);
}

}  // namespace fxopt::cuda

// True when a launch since the last question met a bad id or offset; `text` says which.
FXOPT_EXPORT bool fxopt_cuda_failure(int device, char* text) {
  try {
    fxopt::cuda::Device* known = fxopt::cuda::known_device(device);
    const std::string found = known ? fxopt::cuda::take(*known) : "";
    snprintf(text, 256, "%s", found.c_str());
    return !found.empty();
  } catch (const std::exception& error) {
    snprintf(text, 256, "%s", error.what());
    return true;
  }
}

// Whether the device has reported something that nobody has taken yet. Does not wait.
FXOPT_EXPORT bool fxopt_cuda_reported(int device) {
  const fxopt::cuda::Device* known = fxopt::cuda::known_device(device);
  return known && reinterpret_cast<volatile fxopt::cuda::Failure*>(known->report)->kind != 0;
}

// How many ids the mode "clamp" has moved, by launches that are done. -1: it cannot be read.
FXOPT_EXPORT long long fxopt_cuda_clamped(int device) {
  unsigned long long count;
  const fxopt::cuda::Device* known = fxopt::cuda::known_device(device);
  if (!known) return 0;
  const void* from = &known->errors->clamped;
  return cudaMemcpy(&count, from, sizeof count, cudaMemcpyDeviceToHost) == cudaSuccess ? static_cast<long long>(count) : -1;
}

// Launches of this thread count moved ids only of the first *real_rows (on the device) of `capacity` rows; null: of all.
FXOPT_EXPORT void fxopt_cuda_real_rows(const int64_t* real_rows, int64_t capacity) {
  fxopt::cuda::real_rows = real_rows;
  fxopt::cuda::capacity = capacity;
}

FXOPT_EXPORT void fxopt_cuda_blocking(bool blocking) { fxopt::cuda::blocking = blocking; }
