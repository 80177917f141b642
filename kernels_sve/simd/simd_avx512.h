// Hooks of simd.h for AVX-512 F, BW, DQ and VL, and BF16 where the target has it. Included by simd.h.
#pragma once

namespace fm::FM_TARGET {

FM_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
FM_INLINE vf load_n(const float* p, int n) { return (vf)_mm512_maskz_loadu_ps(first_lanes(n), p); }
FM_INLINE void store_n(float* p, vf v, int n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), (__m512)v);
}
FM_INLINE vu load_u16(const uint16_t* p) {
  return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
}
FM_INLINE vu load_u16_n(const uint16_t* p, int n) {
  return (vu)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
FM_INLINE void store_u16(uint16_t* p, vu v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)v));
}
FM_INLINE void store_u16_n(uint16_t* p, vu v, int n) {
  _mm512_mask_cvtepi32_storeu_epi16(p, first_lanes(n), (__m512i)v);
}
FM_INLINE vi load_i8(const int8_t* p) {
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
}
FM_INLINE vi load_i8_n(const int8_t* p, int n) {
  return (vi)_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_lanes(n), p));
}
FM_INLINE void store_i8_n(int8_t* p, vi v, int n) {
  _mm512_mask_cvtepi32_storeu_epi8(p, first_lanes(n), (__m512i)v);
}
FM_INLINE vf half_to_float(vu h) { return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)h)); }
FM_INLINE vu float_to_half(vf v) {
  return (vu)_mm512_cvtepu16_epi32(_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}
FM_INLINE float hsum(vf v) { return _mm512_reduce_add_ps((__m512)v); }
FM_INLINE float hmax(vf v) { return _mm512_reduce_max_ps((__m512)v); }
FM_INLINE vf reciprocal(vf v) { return 1.0f / v; }
FM_INLINE vf sqrt(vf v) { return (vf)_mm512_sqrt_ps((__m512)v); }
FM_INLINE vf rsqrt(vf v) { return 1.0f / sqrt(v); }
FM_INLINE vu mul_high(vu v, uint32_t m) {
  const __m512i factor = _mm512_set1_epi32(static_cast<int>(m));
  const __m512i even = _mm512_srli_epi64(_mm512_mul_epu32((__m512i)v, factor), 32);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)v, 32), factor);
  return (vu)_mm512_mask_blend_epi32(0xaaaa, even, odd);
}

// One instruction each; the second operand is returned where either is NaN.
#define FM_HAS_FAST_MAX
FM_INLINE vf fast_max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
FM_INLINE vf fast_min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }

// The same bits as simd_math.h's, in 9 instructions instead of 13.
#define FM_HAS_EXP2
template <int N>
FM_INLINE void exp2_each(vf (&v)[N]) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    const vf n =
        (vf)_mm512_roundscale_ps((__m512)v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)v[i], _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    v[i] = (vf)_mm512_maskz_scalef_ps(normal, (__m512)exp2_of_rest(v[i] - n), (__m512)n);
  }
}

FM_INLINE vi to_int(vf v) { return (vi)_mm512_cvtps_epi32((__m512)v); }
FM_INLINE vu bytes_of(vi a, vi b, vi c, vi d) {
  const __m512i low = _mm512_packs_epi32((__m512i)a, (__m512i)b),
                high = _mm512_packs_epi32((__m512i)c, (__m512i)d);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return (vu)_mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
}
FM_INLINE vu shorts_of(vi a, vi b) {
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  return (vu)_mm512_permutexvar_epi64(order, _mm512_packs_epi32((__m512i)a, (__m512i)b));
}
#define FM_HAS_DOT_SHORTS
FM_INLINE vi dot_shorts(vi sum, vu a, vu b) {
  return sum + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
}
#ifdef __AVX512VNNI__
#define FM_HAS_BYTE_DOTS
constexpr int BYTE_OFFSET = 128;
FM_INLINE vi dot_bytes(vi sum, vu a, vu b) {
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
}
#endif

#ifdef __AVX512BF16__
// Pairs of bfloat16 in 32-bit lanes: the even element in the low half; denormal inputs and results count as 0.
#define FM_HAS_BF16_PAIRS
FM_INLINE vf dot_pairs(vf acc, vu a, vu b) {
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}
FM_INLINE vu to_pairs(vf low, vf high) {
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  const vu order = lane_index() | ((lane_index() + 16u) << 16);
  return (vu)_mm512_permutexvar_epi16((__m512i)order, both);
}
FM_INLINE vu high_halves(vf a, vf b) {
  const vu order = lane_index() * 0x40004u + 0x30001u;
  return (vu)_mm512_permutex2var_epi16((__m512i)a, (__m512i)order, (__m512i)b);
}
FM_INLINE vu to_row(vf low, vf high) { return (vu)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }

#define FM_HAS_BF16_RESULTS
FM_INLINE void store_result(bf16* p, vf v) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
}
FM_INLINE void store_result_n(bf16* p, vf v, int n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), (__m256i)_mm512_cvtneps_pbh((__m512)v));
}
#endif

}  // namespace fm::FM_TARGET
