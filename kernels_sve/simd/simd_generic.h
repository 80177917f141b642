// Hooks of simd.h in plain loops over lanes, for the baseline of any machine (SSE2, NEON) and for SVE of 128 bits.
// Included by simd.h.
#pragma once
#include "simd/lane_loops.h"

namespace fm::FM_TARGET {

FM_INLINE vf load_n(const float* p, int n) {
  vf v = {};
  for (int i = 0; i < n; ++i) v[i] = p[i];
  return v;
}
FM_INLINE void store_n(float* p, vf v, int n) {
  for (int i = 0; i < n; ++i) p[i] = v[i];
}
FM_INLINE vu load_u16(const uint16_t* p) { return load_u16_n(p, VL); }
FM_INLINE void store_u16(uint16_t* p, vu v) { store_u16_n(p, v, VL); }

#if defined(__SSE2__)
FM_INLINE vi load_i8(const int8_t* p) {
  int32_t bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  const __m128i twice = _mm_unpacklo_epi8(_mm_cvtsi32_si128(bytes), _mm_cvtsi32_si128(bytes));
  return (vi)_mm_unpacklo_epi16(twice, twice) >> 24;
}
#elif defined(__aarch64__)
FM_INLINE vi load_i8(const int8_t* p) {
  int32_t bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return (vi)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(static_cast<uint32_t>(bytes)))));
}
#else
FM_INLINE vi load_i8(const int8_t* p) { return load_i8_n(p, VL); }
#endif

// Integer algorithms of binary16, whose denormals are exact also while float's are taken as zero.
FM_INLINE vf half_to_float(vu h) {
  const vu magnitude = (h & 0x7fffu) << 13, exponent = h & 0x7c00u;
  const vu denormal = (vu)(to_float(h & 0x3ffu) * 0x1p-24f);
  const vu bits =
      exponent == 0x7c00u ? magnitude | 0x7f800000u : magnitude + 0x38000000u;  // 31 is inf or NaN
  return (vf)((exponent == 0 ? denormal : bits) | (h & 0x8000u) << 16);
}
FM_INLINE vu float_to_half(vf v) {
  const vu bits = (vu)v & 0x7fffffffu;
  const vu sign = ((vu)v >> 16) & 0x8000u;
  const vu normal = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  const vu denormal = (vu)((vf)bits + 0.5f) -
                      0x3f000000u;  // the addition rounds at 2^-24, the unit of a denormal half
  vu half = bits < 0x38800000u ? denormal : normal;
  half = bits >= 0x477ff000u ? broadcast(0x7c00u) : half;
  return sign | (bits > 0x7f800000u ? ((bits >> 13) & 0x3ffu) | 0x7e00u : half);
}

#define FM_HAS_HALF_ARITHMETIC
#ifdef __ARM_FEATURE_FP16_VECTOR_ARITHMETIC
FM_INLINE vu broadcast_half(f16 h) { return (vu)vdupq_n_u16(h.bits); }
FM_INLINE vu fma_halves(vu a, vu b, vu sum) {
  return (vu)vfmaq_f16((float16x8_t)sum, (float16x8_t)a, (float16x8_t)b);
}
#else
FM_INLINE vu broadcast_half(f16 h) { return broadcast(h.bits * 0x10001u); }
// For tests, by float arithmetic: the product of two halves is exact, and a sum rounded to odd (its last bit set when it
// is not exact) rounds to half like the exact one. Error of the sum: Knuth, The Art of Computer Programming 2, 4.2.2.
FM_INLINE vu fma_low_halves(vu a, vu b, vu sum) {
  const vf product = half_to_float(a) * half_to_float(b), term = half_to_float(sum),
           total = product + term;
  const vf part = total - product, error = (product - (total - part)) + (term - part);
  const vu back = (vu)((error < 0.0f) == (total > 0.0f)) & 2u;
  const vu inexact = (vu)((error < 0.0f) | (error > 0.0f)) & 1u & ~(vu)total;
  return float_to_half((vf)((vu)total + inexact - (back & inexact << 1)));
}
FM_INLINE vu fma_halves(vu a, vu b, vu sum) {
  return fma_low_halves(a, b, sum) | fma_low_halves(a >> 16, b >> 16, sum >> 16) << 16;
}
#endif

#if defined(__aarch64__)
FM_INLINE vi to_int(vf v) { return (vi)vcvtnq_s32_f32((float32x4_t)v); }
#elif defined(__SSE2__)
FM_INLINE vi to_int(vf v) { return (vi)_mm_cvtps_epi32((__m128)v); }
#endif
#ifdef __SSE2__
FM_INLINE vu shorts_of(vi a, vi b) { return (vu)_mm_packs_epi32((__m128i)a, (__m128i)b); }
#define FM_HAS_DOT_SHORTS
FM_INLINE vi dot_shorts(vi sum, vu a, vu b) {
  return sum + (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
}
#endif
#ifdef __aarch64__
FM_INLINE vu shorts_of(vi a, vi b) {
  return (vu)vcombine_s16(vmovn_s32((int32x4_t)a), vmovn_s32((int32x4_t)b));
}
#endif
#ifdef __ARM_FEATURE_DOTPROD
#define FM_HAS_BYTE_DOTS
constexpr int BYTE_OFFSET = 0;
FM_INLINE vu bytes_of(vi a, vi b, vi c, vi d) {
  const int16x8_t low = (int16x8_t)shorts_of(a, b), high = (int16x8_t)shorts_of(c, d);
  return (vu)vcombine_s8(vmovn_s16(low), vmovn_s16(high));
}
FM_INLINE vi dot_bytes(vi sum, vu a, vu b) {
  return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b);
}
#endif

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
// As in simd_sve.h.
#define FM_HAS_BF16_PAIRS
#define FM_HAS_BF16_QUADS
FM_INLINE vf dot_pairs(vf sum, vu a, vu b) {
  return (vf)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
FM_INLINE vu to_pairs(vf low, vf high) {
  const uint16x4_t even = (uint16x4_t)vcvt_bf16_f32((float32x4_t)low),
                   odd = (uint16x4_t)vcvt_bf16_f32((float32x4_t)high);
  return (vu)vcombine_u16(vzip1_u16(even, odd), vzip2_u16(even, odd));
}
FM_INLINE vu high_halves(vf a, vf b) { return (vu)vuzp2q_u16((uint16x8_t)a, (uint16x8_t)b); }
FM_INLINE vu to_row(vf low, vf high) {
  return (vu)vcombine_u16((uint16x4_t)vcvt_bf16_f32((float32x4_t)low),
                          (uint16x4_t)vcvt_bf16_f32((float32x4_t)high));
}
FM_INLINE vf multiply_quads(vf sum, vu a, vu b) {
  return (vf)vbfmmlaq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#define FM_HAS_BYTE_QUADS
FM_INLINE vi multiply_byte_quads(vi sum, vu a, vu b) {
  return (vi)vmmlaq_s32((int32x4_t)sum, (int8x16_t)a, (int8x16_t)b);
}
FM_INLINE vu broadcast_quads(const uint32_t* p) { return load(p); }
FM_INLINE vf even_doublewords(vf a, vf b) { return (vf)vzip1q_f64((float64x2_t)a, (float64x2_t)b); }
FM_INLINE vf odd_doublewords(vf a, vf b) { return (vf)vzip2q_f64((float64x2_t)a, (float64x2_t)b); }
#endif

FM_INLINE float hsum(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
FM_INLINE float hmax(vf v) {
  const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
}
FM_INLINE vf reciprocal(vf v) { return 1.0f / v; }
FM_INLINE vf sqrt(vf v) {
#pragma GCC unroll 4
  for (int i = 0; i < VL; ++i) v[i] = __builtin_sqrtf(v[i]);
  return v;
}
FM_INLINE vf rsqrt(vf v) { return 1.0f / sqrt(v); }
#ifdef __SSE2__
FM_INLINE vu mul_high(vu v, uint32_t m) {
  const __m128i factor = _mm_set1_epi32(static_cast<int>(m));
  const __m128i even = _mm_srli_epi64(_mm_mul_epu32((__m128i)v, factor), 32);
  const __m128i odd = _mm_mul_epu32(_mm_srli_epi64((__m128i)v, 32), factor);
  return (vu)even | ((vu)odd & vu{0, ~0u, 0, ~0u});
}
#else
FM_INLINE vu mul_high(vu v, uint32_t m) {
#pragma GCC unroll 4
  for (int i = 0; i < VL; ++i) v[i] = static_cast<uint32_t>(static_cast<uint64_t>(v[i]) * m >> 32);
  return v;
}
#endif

}  // namespace fm::FM_TARGET
