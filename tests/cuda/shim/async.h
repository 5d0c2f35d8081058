// cp.async on the CPU: a copy lands when its thread waits for it, or by the seed's draw for an earlier one, in an order
// that the seed draws too. Until then its place holds NaN patterns.
#pragma once

namespace fxopt::cuda {

template <int BYTES>
void copy_async_few(void* to, const void* from, bool real) {
  if (reinterpret_cast<uintptr_t>(to) % BYTES || reinterpret_cast<uintptr_t>(from) % BYTES)
    shim::complain("a copy of " + std::to_string(BYTES) + " bytes that are not aligned");
  if (real && !shim::readable(from, BYTES)) return shim::complain("a load outside every tensor");
  memset(to, 0xff, BYTES);
  shim::Scheduler::it().copies().back().push_back({static_cast<char*>(to), real ? static_cast<const char*>(from) : nullptr, BYTES});
}

inline void copy_async(void* to, const void* from, bool real) { copy_async_few<16>(to, from, real); }

inline void copy_async_cached(void* to, const void* from) { copy_async(to, from, true); }

inline void commit_copies() { shim::Scheduler::it().copies().emplace_back(); }

template <int PENDING>
void wait_copies() {
  shim::Scheduler& scheduler = shim::Scheduler::it();
  auto& groups = scheduler.copies();  // the last one is not committed
  std::vector<shim::Copy> landing;
  for (size_t g = 0; g < groups.size(); g++) {
    const bool must = g + PENDING + 1 < groups.size();
    std::vector<shim::Copy> later;
    for (const shim::Copy& copy : groups[g]) (must || scheduler.random() % 2 ? landing : later).push_back(copy);
    groups[g] = std::move(later);
  }
  while (groups.size() > PENDING + 1) groups.pop_front();
  std::shuffle(landing.begin(), landing.end(), scheduler.random);
  for (const shim::Copy& copy : landing) copy.from ? memcpy(copy.to, copy.from, copy.bytes) : memset(copy.to, 0, copy.bytes);
}

}  // namespace fxopt::cuda
