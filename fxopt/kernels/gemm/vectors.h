// Vectors of the widest registers, and the elements that matrices hold. Compiled once per instruction set.
#pragma once
#if FXOPT_VECTOR_BYTES > 16
#include <immintrin.h>
#endif
#include <cstdint>
#include <cstring>

namespace fxopt::FXOPT_ISA {

struct Bf16 { uint16_t bits; };

template <class T> struct Accumulated { using type = T; };
template <> struct Accumulated<Bf16> { using type = float; };
template <class T> using Acc = typename Accumulated<T>::type;

inline float widened(float x) { return x; }
inline double widened(double x) { return x; }
inline float widened(Bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

template <class T>
inline T narrowed(Acc<T> x) {
  if constexpr (__is_same(T, Bf16)) {  // to the nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return {0x7fc0};
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
  } else {
    return x;
  }
}

template <class A> struct Register { typedef A type __attribute__((vector_size(FXOPT_VECTOR_BYTES))); };
template <class A> using Vec = typename Register<A>::type;
template <class A> constexpr int kLanesOf = FXOPT_VECTOR_BYTES / int(sizeof(A));

template <class T>
[[gnu::always_inline]] inline Vec<Acc<T>> load(const T* from) {
  Vec<Acc<T>> v{};
  if constexpr (__is_same(T, Bf16)) {
#if FXOPT_VECTOR_BYTES == 64
    v = (Vec<float>)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16);
#elif FXOPT_VECTOR_BYTES == 32
    v = (Vec<float>)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16);
#else
    for (int i = 0; i < kLanesOf<float>; i++) v[i] = widened(from[i]);
#endif
  } else {
    memcpy(&v, from, sizeof v);
  }
  return v;
}

// The first `n` < kLanes elements, and zeros.
template <class T>
[[gnu::always_inline]] inline Vec<Acc<T>> load_some(const T* from, int n) {
#if FXOPT_VECTOR_BYTES == 64
  if constexpr (__is_same(T, float)) return (Vec<float>)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), from);
  if constexpr (__is_same(T, double)) return (Vec<double>)_mm512_maskz_loadu_pd(__mmask8((1u << n) - 1), from);
#endif
  T all[kLanesOf<Acc<T>>] = {};
  for (int i = 0; i < n; i++) all[i] = from[i];
  return load(all);
}

template <class A>
[[gnu::always_inline]] inline Vec<A> fused(Vec<A> a, Vec<A> b, Vec<A> c) {  // a * b + c
#if FXOPT_VECTOR_BYTES == 64
  if constexpr (__is_same(A, float)) return (Vec<A>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  else return (Vec<A>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif FXOPT_VECTOR_BYTES == 32
  if constexpr (__is_same(A, float)) return (Vec<A>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  else return (Vec<A>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  return a * b + c;
#endif
}

template <class A>
[[gnu::always_inline]] inline A sum_of(Vec<A> v) {
#if FXOPT_VECTOR_BYTES == 64
  if constexpr (__is_same(A, float)) return _mm512_reduce_add_ps((__m512)v);
  else return _mm512_reduce_add_pd((__m512d)v);
#else
  A half[kLanesOf<A>];
  memcpy(half, &v, sizeof v);
  for (int n = kLanesOf<A> / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) half[i] += half[i + n];
  return half[0];
#endif
}

// out[i] = the sum of v[i].
template <class A, int N>
[[gnu::always_inline]] inline void sums_of(const Vec<A> (&v)[N], A* out) {
#if FXOPT_VECTOR_BYTES == 64
  if constexpr (__is_same(A, float) && N % 4 == 0) {
    for (int i = 0; i < N; i += 4) {
      const __m512 a = (__m512)v[i], b = (__m512)v[i + 1], c = (__m512)v[i + 2], d = (__m512)v[i + 3];
      const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
      const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
      const __m512 s = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
      const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
      _mm_storeu_ps(out + i, _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1)));
    }
    return;
  }
#elif FXOPT_VECTOR_BYTES == 32
  if constexpr (__is_same(A, float) && N % 4 == 0) {
    for (int i = 0; i < N; i += 4) {
      const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[i], (__m256)v[i + 1]), _mm256_hadd_ps((__m256)v[i + 2], (__m256)v[i + 3]));
      _mm_storeu_ps(out + i, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
    }
    return;
  }
#endif
  for (int i = 0; i < N; i++) out[i] = sum_of<A>(v[i]);
}

}  // namespace fxopt::FXOPT_ISA
