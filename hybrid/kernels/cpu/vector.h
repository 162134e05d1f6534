// Vectors of LANES floats in GCC's portable vector types: one source for AVX2 (8 lanes), AVX-512 (16) and any other
// target of the compiler.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef LANES
#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#endif

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef uint32_t VecU __attribute__((vector_size(LANES * 4)));
typedef int32_t VecI __attribute__((vector_size(LANES * 4)));
typedef uint16_t VecH __attribute__((vector_size(LANES * 2)));
typedef float Vec4 __attribute__((vector_size(16)));
typedef uint32_t Vec4U __attribute__((vector_size(16)));
typedef float Vec4Any __attribute__((vector_size(16), aligned(4), may_alias));
typedef float VecAny __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t VecUAny __attribute__((vector_size(LANES * 4), aligned(2), may_alias));
typedef uint16_t VecHAny __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef int16_t VecSAny __attribute__((vector_size(LANES * 2), aligned(1), may_alias));
typedef int8_t VecBAny __attribute__((vector_size(LANES), aligned(1), may_alias));

struct bf16 {
  uint16_t bits;
};

static inline Vec splat(float x) { return Vec{} + x; }
static inline VecU splat(uint32_t x) { return VecU{} + x; }
static inline Vec load(const float* p) { return *(const VecAny*)p; }
static inline void store(float* p, Vec v) { *(VecAny*)p = v; }
static inline Vec load(const bf16* p) {
  return (Vec)(__builtin_convertvector(*(const VecHAny*)p, VecU) << 16);
}
static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
static inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
static inline bool all(VecI lanes) {
  int32_t set = -1;
  for (int i = 0; i < LANES; i++) set &= lanes[i];
  return set;
}

// The lanes from `HALF` on, first.
template <int HALF> static inline Vec upper(Vec v) {
#if LANES == 8
  return __builtin_shufflevector(v, v, HALF, HALF + 1, HALF + 2, HALF + 3, HALF + 4, HALF + 5, HALF + 6, HALF + 7);
#else
  return __builtin_shufflevector(v, v, HALF, HALF + 1, HALF + 2, HALF + 3, HALF + 4, HALF + 5, HALF + 6, HALF + 7, HALF + 8, HALF + 9, HALF + 10,
                                 HALF + 11, HALF + 12, HALF + 13, HALF + 14, HALF + 15);
#endif
}
static inline float sum(Vec v) {
  if constexpr (LANES == 16) v += upper<LANES / 2>(v);
  v += upper<4>(v);
  v += upper<2>(v);
  return (v + upper<1>(v))[0];
}
static inline float largest(Vec v) {
  if constexpr (LANES == 16) v = max(v, upper<LANES / 2>(v));
  v = max(v, upper<4>(v));
  v = max(v, upper<2>(v));
  return max(v, upper<1>(v))[0];
}

// The nearest bfloat16, ties to even, as a float.
static inline Vec to_bf16(Vec v) {
  VecU u = (VecU)v;
  return (Vec)((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
}
static inline Vec4 to_bf16(Vec4 v) {
  Vec4U u = (Vec4U)v;
  return (Vec4)((u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u);
}
static inline float to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  u = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  std::memcpy(&x, &u, 4);
  return x;
}
// Rounding to the model's dtype T.
template <typename T> static inline Vec rounded(Vec v);
template <> inline Vec rounded<float>(Vec v) { return v; }
template <> inline Vec rounded<bf16>(Vec v) { return to_bf16(v); }
template <typename T> static inline Vec4 rounded(Vec4 v);
template <> inline Vec4 rounded<float>(Vec4 v) { return v; }
template <> inline Vec4 rounded<bf16>(Vec4 v) { return to_bf16(v); }
template <typename T> static inline float rounded(float x);
template <> inline float rounded<float>(float x) { return x; }
template <> inline float rounded<bf16>(float x) { return to_bf16(x); }
static inline void store(float* p, float x) { *p = x; }
static inline void store(bf16* p, float x) {
  x = to_bf16(x);
  uint32_t u;
  std::memcpy(&u, &x, 4);
  p->bits = uint16_t(u >> 16);
}

// A product plus a sum, rounded twice or once. Without these, GCC 12 decides loop by loop, and a row may run in several.
#if defined(__AVX512F__)
constexpr size_t REGISTER_BYTES = 64;
#elif defined(__AVX__)
constexpr size_t REGISTER_BYTES = 32;
#else
constexpr size_t REGISTER_BYTES = 16;
#endif
template <typename F> static inline F unfused(F product) {
  if constexpr (sizeof(F) > REGISTER_BYTES)
    asm("" : "+m"(product));
  else
#if defined(__x86_64__)
    asm("" : "+x"(product));
#elif defined(__aarch64__)
    asm("" : "+w"(product));
#endif
  return product;
}
static inline float fused_multiply_add(float x, float y, float z) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(x, y, z);
#else
  return x * y + z;
#endif
}

// e^x to about one unit in the last place (Cephes' expf); 0 below -87.3.
static inline Vec exp(Vec x) {
  Vec t = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the integer lands in the low bits
  Vec n = t - 12582912.0f;
  Vec r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Vec scaled = (Vec)((VecI)p + ((VecI)t << 23));
  return (Vec)((VecI)scaled & (x > -87.3f));
}
// 2^x to 3e-6 of its value, a thousandth of what rounding it to bfloat16 changes; 0 below 2^-126.  x: at most 1.
static inline Vec exp2_for_bf16(Vec x) {
  const Vec t = x + 12582912.0f, r = x - (t - 12582912.0f);  // as in `exp`
  Vec p = splat(9.58285e-3f);
  p = p * r + 5.590643e-2f;
  p = p * r + 2.4024099e-1f;
  p = p * r + 6.9312419e-1f;
  p = p * r + 1.0f;
  return (Vec)(((VecI)p + ((VecI)t << 23)) & (x > -126.0f));
}
static inline Vec tanh(Vec x) {
  Vec a = (Vec)((VecU)x & 0x7fffffffu), b = x * x;
  Vec small = x + x * b * (-0.333333333f + b * (0.133333333f + b * (-0.0539682540f + b * 0.0218694885f)));
  Vec large = 1.0f - 2.0f / (exp(2.0f * (a > 10.0f ? splat(10.0f) : a)) + 1.0f);
  large = (Vec)((VecU)large | ((VecU)x & 0x80000000u));
  return a < 0.25f ? small : large;
}
// Abramowitz and Stegun 7.1.26: within 1.5e-7.
static inline Vec erf(Vec x) {
  Vec a = (Vec)((VecU)x & 0x7fffffffu), t = 1.0f / (1.0f + 0.3275911f * a);
  Vec p = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  return (Vec)((VecU)(1.0f - p * exp(-a * a)) | ((VecU)x & 0x80000000u));
}

// The sums over lanes of four vectors. The order of the additions does not depend on tile or batch, so a row's result
// does not depend on its neighbours.
static inline Vec4 sums(Vec a, Vec b, Vec c, Vec d) {
#if LANES == 8
  Vec ab = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
  Vec cd = __builtin_shufflevector(c, d, 0, 8, 2, 10, 4, 12, 6, 14) + __builtin_shufflevector(c, d, 1, 9, 3, 11, 5, 13, 7, 15);
  // a0 b0 a1 b1 a2 b2 a3 b3
  Vec abcd = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
  return __builtin_shufflevector(abcd, abcd, 0, 1, 2, 3) + __builtin_shufflevector(abcd, abcd, 4, 5, 6, 7);
#else
  // Within each quarter of 4 lanes: a01 b01 a23 b23, then a b c d; then the four quarters.
  Vec ab = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  Vec cd = __builtin_shufflevector(c, d, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(c, d, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  Vec abcd = __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
             __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  typedef float Half __attribute__((vector_size(32)));
  const Half half = __builtin_shufflevector(abcd, abcd, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(abcd, abcd, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
#endif
}
