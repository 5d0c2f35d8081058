// AOTInductor's way into a kernel: its arguments in C, no dispatcher, and nothing boxed (shims.py).
#pragma once
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>

#include <charconv>
#include <cstdarg>
#include <cstring>
#include <string>

#include "dispatched.h"
#include "simd/cpu.h"

namespace fxopt {

inline void add_words(std::vector<int64_t>& words, int64_t number) { words.push_back(number); }
inline void add_words(std::vector<int64_t>& words, int32_t number) { words.push_back(number); }  // a bool, in C
inline void add_words(std::vector<int64_t>& words, const std::vector<int64_t>& numbers) {
  words.insert(words.end(), numbers.begin(), numbers.end());
}
inline void add_words(std::vector<int64_t>& words, double number) {
  int64_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  words.push_back(bits);
}
// Numbers between commas, as words.py writes them.
inline void add_words(std::vector<int64_t>& words, const char* at) {
  const char* const end = at + std::strlen(at);
  for (;; at++) {
    const auto [behind, error] = std::from_chars(at, end, words.emplace_back());
    at = behind;
    if (error != std::errc() || (at < end && *at != ',')) refused("fxopt: expected whole numbers between commas");
    if (at == end) return;
  }
}
inline void add_words(std::vector<int64_t>& words, const std::string& text) { add_words(words, text.c_str()); }

template <class... Numbers>
std::vector<int64_t> words_of(const Numbers&... numbers) {
  std::vector<int64_t> words;
  (add_words(words, numbers), ...);
  return words;
}

// A tensor that AOTInductor holds.
inline Array operand_of(AtenTensorHandle handle) {
  int64_t numel, dim;
  int64_t *sizes, *strides;
  int32_t dtype;
  void* data;
  aoti_torch_get_numel(handle, &numel);
  aoti_torch_get_dim(handle, &dim);
  aoti_torch_get_sizes(handle, &sizes);
  aoti_torch_get_strides(handle, &strides);
  aoti_torch_get_dtype(handle, &dtype);
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &data));
  if (numel > kMostElements) refused("fxopt: a tensor with more numbers than a memory holds");
  return {static_cast<char*>(data), sizes, strides, int32_t(dim), dtype};
}

// One call. An exception passes through the shim to the model's own handler, which keeps its text.
class CCall {
 public:
  // device: as of Results.
  explicit CCall(int32_t device = -1) : device_(device) { operands_.clear(), counts_.clear(), words_.clear(); }
  ~CCall() {
    for (AtenTensorHandle handle : results_) aoti_torch_delete_tensor_object(handle);
  }

  void tensor(AtenTensorHandle handle) { tensors(&handle, 1); }
  void optional(const AtenTensorHandle* handle) { optionals(&handle, 1); }
  void tensors(const AtenTensorHandle* handles, int64_t n) {
    for (int64_t k = 0; k < n; k++) operands_.push_back(operand_of(handles[k]));
    counts_.push_back(n);
  }
  void optionals(const AtenTensorHandle* const* handles, int64_t n) {
    for (int64_t k = 0; k < n; k++) operands_.push_back(handles[k] ? operand_of(*handles[k]) : Array{nullptr, nullptr, nullptr, -1, 0});
    counts_.push_back(n);
  }
  template <class Number>
  void number(Number number) { add_words(words_, number); }
  void numbers(const int64_t* numbers, int64_t n) { given_ = numbers, n_given_ = n; }

  void plan(AtenTensorHandle handle) {
    const Array plan = operand_of(handle);
    numbers(reinterpret_cast<const int64_t*>(plan.data), plan.sizes[0]);
  }

  template <class Kernel>
  void run(const Kernel& kernel) {
    const Request request{operands_.data(), counts_.data(), int64_t(operands_.size()), int64_t(counts_.size()),
                          given_ ? given_ : words_.data(), given_ ? n_given_ : int64_t(words_.size()), allocate, this};
    kernel(&request);
  }

  // Of the results the first n; the others are scratch.
  void keep(int64_t n) {
    for (; int64_t(results_.size()) > n; results_.pop_back()) aoti_torch_delete_tensor_object(results_.back());
  }

  // To the addresses behind the arguments of the shim; where one is null, nobody reads the result.
  void give(va_list addresses) {
    for (AtenTensorHandle handle : std::exchange(results_, {})) {
      AtenTensorHandle* to = va_arg(addresses, AtenTensorHandle*);
      if (to) *to = handle;
      else aoti_torch_delete_tensor_object(handle);
    }
  }

 private:
  static char* allocate(void* context, int32_t dim, const int64_t* sizes, int32_t dtype) {
    auto& call = *static_cast<CCall*>(context);
    call.results_.push_back(empty_handle(call.device_, dim, sizes, dtype));
    void* data;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(call.results_.back(), &data));
    return static_cast<char*>(data);
  }

  static thread_local inline std::vector<Array> operands_;  // they keep their memory between calls
  static thread_local inline std::vector<int64_t> counts_, words_;
  const int64_t* given_ = nullptr;  // a plan as it is
  int64_t n_given_ = 0;
  int32_t device_;
  std::vector<AtenTensorHandle> results_;
};

// A model's package looks for its shims among what is open to all, and whoever loads a library may keep it closed.
[[gnu::constructor]] static void open_to_all() {
  Dl_info own;
  if (dladdr(reinterpret_cast<void*>(&open_to_all), &own)) dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL);
}

}  // namespace fxopt
