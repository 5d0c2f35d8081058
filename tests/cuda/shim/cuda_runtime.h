// CUDA on the CPU, for tests: a .cu compiled as C++ with this header in place of CUDA's.
//
// A CUDA thread is a fiber, a block is run at a time, or all of those that wait for each other (grid.h). Warp collectives
// and barriers rendezvous: a fiber that reaches one waits until all that must take part are there, and threads at
// different ones, or some that never come, stop the run with a message. Which fiber runs next is drawn from a seed, and which
// warp does not run for a while, so
// an order that only works by luck fails for some seed. Loads through __ldg and __ldcg must lie within memory that the
// test named, and be aligned. Fresh memory, and shared memory at the start of each block, holds NaN patterns.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static  // with zones around it that may not be touched
#else
#define __shared__ static __attribute__((section("shim_shared")))  // all of it side by side, to be poisoned
extern "C" char __start_shim_shared[] __attribute__((weak)), __stop_shim_shared[] __attribute__((weak));
#endif
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__

struct uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 {
  unsigned x, y = 1, z = 1;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 blockIdx, gridDim, blockDim;

namespace shim {

inline std::map<const char*, size_t> named;  // memory that may be read
inline std::string problem;                  // the first one of a run
inline uint64_t seed = 0;
inline int planted = 0;  // the bug that a mutant shows, 0: none

inline void complain(const std::string& what) {
  if (problem.empty()) problem = what;
}

inline bool readable(const void* at, size_t bytes) {
  auto after = named.upper_bound(static_cast<const char*>(at));
  if (after == named.begin()) return false;
  --after;
  return static_cast<const char*>(at) + bytes <= after->first + after->second;
}

// Bytes on their way into shared memory; from null: zeros.
struct Copy {
  char* to;
  const char* from;
  size_t bytes;
};

enum State { kReady, kAtWarp, kAtSome, kAtBlock, kAtGrid, kDone };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  State state;
  const char* where;  // the collective it waits at
  uint64_t given, taken[32];
  std::deque<std::vector<Copy>> copies;  // groups that nobody waited for, the last one not committed
};

// What a block that others run beside has of its own. Its shared memory is here while another one runs.
struct Block {
  dim3 index;
  std::vector<char> shared;
  std::vector<float4> dynamic;
};

struct Scheduler {
  static constexpr size_t kStack = 256 * 1024;
  std::vector<Fiber> fibers;  // block by block
  std::vector<Block> blocks;
  ucontext_t main;
  int current = 0, threads = 0, inside = 0;  // threads: of a block; inside: the block that runs
  std::mt19937_64 random;
  std::function<void()> body;

  static Scheduler& it() {
    static Scheduler scheduler;
    return scheduler;
  }

  static void enter() {
    Scheduler& s = it();
    s.body();
    for (const auto& group : s.copies())
      if (!group.empty()) complain("copies that nobody waits for");
    s.fibers[s.current].state = kDone;
    swapcontext(&s.fibers[s.current].context, &s.main);
  }

  void run(std::vector<dim3> indices, int threads_of_each, size_t dynamic_bytes = 0) {
    threads = threads_of_each;
    const int all = int(indices.size()) * threads;
    blocks.assign(indices.size(), {});
    for (size_t b = 0; b < blocks.size(); b++) {
      blocks[b].index = indices[b];
      blocks[b].dynamic.resize((dynamic_bytes + sizeof(float4) - 1) / sizeof(float4));
      if (dynamic_bytes) memset(static_cast<void*>(blocks[b].dynamic.data()), 0xff, dynamic_bytes);
    }
    start();
    while (int(fibers.size()) < all) {
      fibers.emplace_back();
      fibers.back().stack.reset(new char[kStack]);
    }
    for (int t = 0; t < all; t++) {
      getcontext(&fibers[t].context);
      fibers[t].context.uc_stack = {fibers[t].stack.get(), 0, kStack};
      fibers[t].context.uc_link = &main;
      makecontext(&fibers[t].context, &enter, 0);
      fibers[t].state = kReady;
      fibers[t].copies.assign(1, {});
    }
    std::vector<int> ready;
    int still = all;  // the first thread of a warp that stands still for a while, as long as others can run
    for (;;) {
      ready.clear();
      int done = 0;
      for (int t = 0; t < all; t++) {
        if (fibers[t].state == kReady) ready.push_back(t);
        done += fibers[t].state == kDone;
      }
      if (done == all || !problem.empty()) return;
      if (ready.empty()) return complain("deadlock: threads wait for others that never come");
      std::shuffle(ready.begin(), ready.end(), random);
      if (random() % 16 == 0) still = int(random() % unsigned(all / 32 + 1)) * 32;
      const bool others = std::any_of(ready.begin(), ready.end(), [&](int t) { return t / 32 != still / 32; });
      for (int t : ready) {
        if (fibers[t].state != kReady || (others && t / 32 == still / 32)) continue;
        current = t;
        go_to(t / threads);
        swapcontext(&main, &fibers[t].context);
        release();
        if (!problem.empty()) return;
      }
    }
  }

  // Poison, and the first block.
  void start() {
    inside = 0;
    blockIdx = blocks[0].index;
#ifndef __SANITIZE_ADDRESS__
    if (__start_shim_shared) {
      memset(__start_shim_shared, 0xff, size_t(__stop_shim_shared - __start_shim_shared));
      if (blocks.size() > 1)
        for (Block& block : blocks) block.shared.assign(__start_shim_shared, __stop_shim_shared);
    }
#else
    if (blocks.size() > 1) complain("blocks that run together share their shared memory here");
#endif
  }

  void go_to(int block) {
    if (block == inside) return;
#ifndef __SANITIZE_ADDRESS__
    if (__start_shim_shared) {
      std::copy(__start_shim_shared, __stop_shim_shared, blocks[inside].shared.begin());
      std::copy(blocks[block].shared.begin(), blocks[block].shared.end(), __start_shim_shared);
    }
#endif
    inside = block;
    blockIdx = blocks[block].index;
  }

  // Lets go whoever is complete: a warp at one collective, a block or all of them at one barrier.
  void release() {
    const int warp = current / 32 * 32, block = current / threads * threads, all = int(blocks.size()) * threads;
    if (fibers[current].state == kAtWarp) {
      for (int t = warp; t < warp + 32; t++)
        if (fibers[t].state != kAtWarp) return;
      for (int t = warp; t < warp + 32; t++)
        if (strcmp(fibers[t].where, fibers[warp].where)) return complain(std::string("threads of a warp at ") + fibers[t].where + " and " + fibers[warp].where);
      for (int t = warp; t < warp + 32; t++)
        for (int k = 0; k < 32; k++) fibers[t].taken[k] = fibers[warp + k].given;
      for (int t = warp; t < warp + 32; t++) fibers[t].state = kReady;
    } else if (fibers[current].state == kAtSome) {  // as many as the barrier counts, aligned
      const uint64_t given = fibers[current].given;
      const int count = int(given & 0xffff), first = current / count * count;
      for (int t = first; t < first + count; t++)
        if (fibers[t].state != kAtSome) return;
      for (int t = first; t < first + count; t++)
        if (fibers[t].given != given) return complain("threads at barriers of other numbers or counts");
      for (int t = first; t < first + count; t++) fibers[t].state = kReady;
    } else if (fibers[current].state == kAtBlock) {
      for (int t = block; t < block + threads; t++)
        if (fibers[t].state != kAtBlock) return;
      for (int t = block; t < block + threads; t++) fibers[t].state = kReady;
    } else if (fibers[current].state == kAtGrid) {
      for (int t = 0; t < all; t++)
        if (fibers[t].state != kAtGrid) return;
      for (int t = 0; t < all; t++) fibers[t].state = kReady;
    }
  }

  std::deque<std::vector<Copy>>& copies() { return fibers[current].copies; }

  const uint64_t* meet(State at, const char* where, uint64_t given) {
    Fiber& fiber = fibers[current];
    fiber.state = at;
    fiber.where = where;
    fiber.given = given;
    swapcontext(&fiber.context, &main);
    return fiber.taken;
  }
};

template <class T>
inline uint64_t bits(T x) {
  uint64_t b = 0;
  memcpy(&b, &x, sizeof x);
  return b;
}
template <class T>
inline T from_bits(uint64_t b) {
  T x;
  memcpy(&x, &b, sizeof x);
  return x;
}

struct ThreadIndex {
  operator unsigned() const { return unsigned(Scheduler::it().current % Scheduler::it().threads); }
};
struct Index {
  ThreadIndex x;
};

}  // namespace shim

inline shim::Index threadIdx;

inline const uint64_t* shim_warp(unsigned mask, const char* where, uint64_t given) {
  if (mask != 0xffffffffu) shim::complain("a collective of part of a warp");
  return shim::Scheduler::it().meet(shim::kAtWarp, where, given);
}
inline int shim_lane() { return shim::Scheduler::it().current & 31; }

template <class T>
T __shfl_sync(unsigned mask, T x, int from, int width = 32) {
  const int lane = (shim_lane() & ~(width - 1)) | (from & (width - 1));
  return shim::from_bits<T>(shim_warp(mask, "shfl", shim::bits(x))[lane]);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int with) {
  return shim::from_bits<T>(shim_warp(mask, "shfl_xor", shim::bits(x))[shim_lane() ^ with]);
}
inline unsigned __ballot_sync(unsigned mask, bool x) {
  const uint64_t* all = shim_warp(mask, "ballot", x);
  unsigned votes = 0;
  for (int k = 0; k < 32; k++) votes |= unsigned(all[k] != 0) << k;
  return votes;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
inline bool __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) == 0xffffffffu; }
inline void __syncwarp() { shim_warp(0xffffffffu, "syncwarp", 0); }
inline void __barrier_sync_count(unsigned id, unsigned count) { shim::Scheduler::it().meet(shim::kAtSome, "barrier", id << 16 | count); }
inline void __syncthreads() { shim::Scheduler::it().meet(shim::kAtBlock, "syncthreads", 0); }

template <class T>
T __ldg(const T* from) {
  const bool aligned = reinterpret_cast<uintptr_t>(from) % alignof(T) == 0;
  if (aligned && shim::readable(from, sizeof(T))) return *from;
  shim::complain(aligned ? "a load outside every tensor" : "a load that is not aligned");
  return T{};
}

template <class T>
T __ldcg(const T* from) { return __ldg(from); }

inline float __fdividef(float x, float y) { return x / y; }

template <class T>
void __stcs(T* to, T x) { *to = x; }

// Fibers change places only at collectives, so plain reads and writes between two are atomic.
template <class T>
T atomicAdd(T* at, T x) { T old = *at; *at += x; return old; }
template <class T>
T atomicCAS(T* at, T expected, T x) { T old = *at; if (old == expected) *at = x; return old; }
template <class T>
T atomicExch(T* at, T x) { T old = *at; *at = x; return old; }
inline void __threadfence() {}
inline void __threadfence_system() {}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) { return uint64_t(static_cast<unsigned __int128>(a) * b >> 64); }
inline float __uint_as_float(unsigned x) { return shim::from_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return unsigned(shim::bits(x)); }

#include "async.h"
#include "half.h"
#include "host_api.h"
#include "grid.h"
