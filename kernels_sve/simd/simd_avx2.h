// Hooks of simd.h for AVX2 with FMA and F16C. Included by simd.h.
#pragma once
#include "simd/lane_loops.h"

namespace fm::FM_TARGET {

FM_INLINE __m256i first_lanes(int n) { return (__m256i)((vi)lane_index() < n); }
FM_INLINE vf load_n(const float* p, int n) { return (vf)_mm256_maskload_ps(p, first_lanes(n)); }
FM_INLINE void store_n(float* p, vf v, int n) { _mm256_maskstore_ps(p, first_lanes(n), (__m256)v); }

FM_INLINE __m128i narrow(vu v) {
  const __m256i low = (__m256i)(v & 0xffffu);
  return _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
}
FM_INLINE vu load_u16(const uint16_t* p) {
  return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
}
FM_INLINE void store_u16(uint16_t* p, vu v) { _mm_storeu_si128((__m128i*)p, narrow(v)); }
FM_INLINE vi load_i8(const int8_t* p) {
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
FM_INLINE vf half_to_float(vu h) { return (vf)_mm256_cvtph_ps(narrow(h)); }
FM_INLINE vu float_to_half(vf v) {
  return (vu)_mm256_cvtepu16_epi32(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}
FM_INLINE float hsum(vf v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
FM_INLINE float hmax(vf v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
FM_INLINE vf reciprocal(vf v) { return 1.0f / v; }
FM_INLINE vf sqrt(vf v) { return (vf)_mm256_sqrt_ps((__m256)v); }
FM_INLINE vf rsqrt(vf v) { return 1.0f / sqrt(v); }
FM_INLINE vi to_int(vf v) { return (vi)_mm256_cvtps_epi32((__m256)v); }
FM_INLINE vu bytes_of(vi a, vi b, vi c, vi d) {
  const __m256i low = _mm256_packs_epi32((__m256i)a, (__m256i)b),
                high = _mm256_packs_epi32((__m256i)c, (__m256i)d);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return (vu)_mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
}
FM_INLINE vu shorts_of(vi a, vi b) {
  return (vu)_mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)a, (__m256i)b), 0xd8);
}
#define FM_HAS_DOT_SHORTS
FM_INLINE vi dot_shorts(vi sum, vu a, vu b) {
  return sum + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
#ifdef __AVXVNNI__
#define FM_HAS_BYTE_DOTS
constexpr int BYTE_OFFSET = 128;
FM_INLINE vi dot_bytes(vi sum, vu a, vu b) {
  return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
}
#endif
FM_INLINE vu mul_high(vu v, uint32_t m) {
  const __m256i factor = _mm256_set1_epi32(static_cast<int>(m));
  const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32((__m256i)v, factor), 32);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)v, 32), factor);
  return (vu)_mm256_blend_epi32(even, odd, 0xaa);
}

}  // namespace fm::FM_TARGET
