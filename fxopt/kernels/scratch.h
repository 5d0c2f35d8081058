// Memory for intermediates.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fxopt {

// Of this thread: it grows, starts at a cache line, and is valid until it is asked for again.
static inline char* scratch(size_t bytes) {
  thread_local std::vector<char> memory;
  if (memory.size() < bytes + 64) memory.resize(bytes + 64);
  return memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
}

}  // namespace fxopt
