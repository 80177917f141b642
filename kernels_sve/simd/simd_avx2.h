// Hooks of simd.h for AVX2 with FMA and F16C. Included by simd.h.
#pragma once

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
FM_INLINE vu load_u16_n(const uint16_t* p, int n) {
  vu v = {};
  for (int i = 0; i < n; ++i) v[i] = p[i];
  return v;
}
FM_INLINE void store_u16_n(uint16_t* p, vu v, int n) {
  for (int i = 0; i < n; ++i) p[i] = static_cast<uint16_t>(v[i]);
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
FM_INLINE vu mul_high(vu v, uint32_t m) {
  const __m256i factor = _mm256_set1_epi32(static_cast<int>(m));
  const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32((__m256i)v, factor), 32);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)v, 32), factor);
  return (vu)_mm256_blend_epi32(even, odd, 0xaa);
}

}  // namespace fm::FM_TARGET
