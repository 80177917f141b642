// Hooks of simd.h for SVE of a fixed length above 128 bits (ACLE). Included by simd.h.
#pragma once

#define FM_HAS_EXP

namespace fm::FM_TARGET {

FM_INLINE svbool_t first_lanes(int n) { return svwhilelt_b32(0, n); }
FM_INLINE vf load_n(const float* p, int n) { return (vf)svld1_f32(first_lanes(n), p); }
FM_INLINE void store_n(float* p, vf v, int n) { svst1_f32(first_lanes(n), p, (svfloat32_t)v); }
FM_INLINE vu load_u16(const uint16_t* p) { return (vu)svld1uh_u32(svptrue_b32(), p); }
FM_INLINE vu load_u16_n(const uint16_t* p, int n) { return (vu)svld1uh_u32(first_lanes(n), p); }
FM_INLINE void store_u16(uint16_t* p, vu v) { svst1h_u32(svptrue_b32(), p, (svuint32_t)v); }
FM_INLINE void store_u16_n(uint16_t* p, vu v, int n) {
  svst1h_u32(first_lanes(n), p, (svuint32_t)v);
}
FM_INLINE vi load_i8(const int8_t* p) { return (vi)svld1sb_s32(svptrue_b32(), p); }
FM_INLINE vi load_i8_n(const int8_t* p, int n) { return (vi)svld1sb_s32(first_lanes(n), p); }
FM_INLINE void store_i8_n(int8_t* p, vi v, int n) { svst1b_s32(first_lanes(n), p, (svint32_t)v); }
FM_INLINE vf half_to_float(vu h) {
  return (vf)svcvt_f32_f16_x(svptrue_b32(), svreinterpret_f16_u32((svuint32_t)h));
}
FM_INLINE vu float_to_half(vf v) {
  return (vu)svreinterpret_u32_f16(svcvt_f16_f32_x(svptrue_b32(), (svfloat32_t)v)) & 0xffffu;
}
#define FM_HAS_HALF_ARITHMETIC
FM_INLINE svfloat16_t halves(vu v) { return svreinterpret_f16_u32((svuint32_t)v); }
FM_INLINE vu fma_halves(vu a, vu b, vu sum) {
  return (vu)svreinterpret_u32_f16(svmla_f16_x(svptrue_b16(), halves(sum), halves(a), halves(b)));
}
FM_INLINE vu broadcast_half(f16 h) { return (vu)svreinterpret_u32_u16(svdup_n_u16(h.bits)); }
FM_INLINE float hsum(vf v) { return svaddv_f32(svptrue_b32(), (svfloat32_t)v); }
FM_INLINE float hmax(vf v) { return svmaxv_f32(svptrue_b32(), (svfloat32_t)v); }

FM_INLINE vi to_int(vf v) {
  const svfloat32_t whole = svrintn_f32_x(svptrue_b32(), (svfloat32_t)v);
  return (vi)svcvt_s32_f32_x(svptrue_b32(), whole);
}
FM_INLINE vu shorts_of(vi a, vi b) {
  const svint16_t low = svreinterpret_s16_s32((svint32_t)a),
                  high = svreinterpret_s16_s32((svint32_t)b);
  return (vu)svreinterpret_u32_s16(svuzp1_s16(low, high));
}
FM_INLINE svint8_t bytes(vu v) { return svreinterpret_s8_u32((svuint32_t)v); }
FM_INLINE vu bytes_of(vi a, vi b, vi c, vi d) {
  return (vu)svreinterpret_u32_s8(svuzp1_s8(bytes(shorts_of(a, b)), bytes(shorts_of(c, d))));
}
#define FM_HAS_BYTE_DOTS
constexpr int BYTE_OFFSET = 0;
FM_INLINE vi dot_bytes(vi sum, vu a, vu b) {
  return (vi)svdot_s32((svint32_t)sum, bytes(a), bytes(b));
}

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC  // with SVE: GCC 12 has the intrinsics, but not __ARM_FEATURE_SVE_BF16
// Pairs of bfloat16 in 32-bit lanes, the even element in the low half; and 2 x 4 matrices of them in 128 bits, row by row.
#define FM_HAS_BF16_PAIRS
#define FM_HAS_BF16_QUADS
FM_INLINE svbfloat16_t bf16_elements(vu v) { return svreinterpret_bf16_u32((svuint32_t)v); }
FM_INLINE vf dot_pairs(vf sum, vu a, vu b) {
  return (vf)svbfdot_f32((svfloat32_t)sum, bf16_elements(a), bf16_elements(b));
}
FM_INLINE vu to_pairs(vf low, vf high) {
  const svbfloat16_t even = svcvt_bf16_f32_x(svptrue_b32(), (svfloat32_t)low);
  return (vu)svreinterpret_u32_bf16(svcvtnt_bf16_f32_m(even, svptrue_b32(), (svfloat32_t)high));
}
FM_INLINE vu high_halves(vf a, vf b) {
  const svuint16_t low = svreinterpret_u16_f32((svfloat32_t)a),
                   high = svreinterpret_u16_f32((svfloat32_t)b);
  return (vu)svreinterpret_u32_u16(svuzp2_u16(low, high));
}
FM_INLINE vu to_row(vf low, vf high) {
  const svuint16_t first =
      svreinterpret_u16_bf16(svcvt_bf16_f32_x(svptrue_b32(), (svfloat32_t)low));
  const svuint16_t second =
      svreinterpret_u16_bf16(svcvt_bf16_f32_x(svptrue_b32(), (svfloat32_t)high));
  return (vu)svreinterpret_u32_u16(svuzp1_u16(first, second));
}
FM_INLINE vf multiply_quads(vf sum, vu a, vu b) {
  return (vf)svbfmmla_f32((svfloat32_t)sum, bf16_elements(a), bf16_elements(b));
}
FM_INLINE vu broadcast_quads(const uint32_t* p) { return (vu)svld1rq_u32(svptrue_b32(), p); }
#define FM_HAS_BYTE_QUADS  // every CPU with BFMMLA has SMMLA
FM_INLINE vi multiply_byte_quads(vi sum, vu a, vu b) {
  return (vi)svmmla_s32((svint32_t)sum, bytes(a), bytes(b));
}
FM_INLINE svfloat64_t doublewords(vf v) { return svreinterpret_f64_f32((svfloat32_t)v); }
FM_INLINE vf even_doublewords(vf a, vf b) {
  return (vf)svreinterpret_f32_f64(svuzp1_f64(doublewords(a), doublewords(b)));
}
FM_INLINE vf odd_doublewords(vf a, vf b) {
  return (vf)svreinterpret_f32_f64(svuzp2_f64(doublewords(a), doublewords(b)));
}
#endif

// Chains that take a stage with a further register each: of 8, with the caller's 8 values, not all fit 32 registers.
constexpr int half_of_chains(int chains) { return chains == 8 ? 4 : chains; }

// 8-bit estimate, then Newton steps of 16 and 32 bits.
#define FM_HAS_NEWTON_STEPS
template <int N>
FM_INLINE void reciprocal_each(vf (&v)[N]) {
  constexpr int HALF = half_of_chains(N);
  vf e[N], step[HALF];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) e[i] = (vf)svrecpe_f32((svfloat32_t)v[i]);
#pragma GCC unroll 4
  for (int times = 0; times < 2; ++times) {
#pragma GCC unroll 4
    for (int first = 0; first < N; first += HALF) {
#pragma GCC unroll 16
      for (int i = 0; i < HALF; ++i) {
        step[i] = (vf)svrecps_f32((svfloat32_t)v[first + i], (svfloat32_t)e[first + i]);
      }
#pragma GCC unroll 16
      for (int i = 0; i < HALF; ++i) e[first + i] = e[first + i] * step[i];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) v[i] = e[i];
}
template <int N>
FM_INLINE void rsqrt_each(vf (&v)[N]) {
  vf e[N], step[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) e[i] = (vf)svrsqrte_f32((svfloat32_t)v[i]);
#pragma GCC unroll 2
  for (int times = 0; times < 2; ++times) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) step[i] = v[i] * e[i];
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) step[i] = (vf)svrsqrts_f32((svfloat32_t)step[i], (svfloat32_t)e[i]);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) e[i] = e[i] * step[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) v[i] = e[i];
}
template <int N>
FM_INLINE void sqrt_each(vf (&v)[N]) {
  vf e[N], s[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) e[i] = v[i];
  rsqrt_each(e);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) s[i] = v[i] * e[i];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) e[i] = s[i] + (v[i] - s[i] * s[i]) * (0.5f * e[i]);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) v[i] = v[i] == 0.0f || v[i] == __builtin_inff() ? v[i] : e[i];
}
FM_INLINE vf reciprocal(vf v) {
  vf one[1] = {v};
  reciprocal_each(one);
  return one[0];
}
FM_INLINE vf rsqrt(vf v) {
  vf one[1] = {v};
  rsqrt_each(one);
  return one[0];
}
FM_INLINE vf sqrt(vf v) {
  vf one[1] = {v};
  sqrt_each(one);
  return one[0];
}
FM_INLINE vu mul_high(vu v, uint32_t m) {
  return (vu)svmulh_n_u32_x(svptrue_b32(), (svuint32_t)v, m);
}

// FEXPA makes 2^(i/64) from the low bits of i + 64 * 127: no table, a short polynomial. Constants as in Arm Optimized
// Routines' SVE expf.
FM_INLINE vf exp(vf x) {
  constexpr float SHIFT = 0x1.903f8p17f;
  const vf shifted = x * 0x1.715476p+0f + SHIFT;
  const vf n = shifted - SHIFT;
  const vf r = x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;
  const vf scale = (vf)svexpa_f32((svuint32_t)(vu)shifted);
  const vf p = r + r * r * (0.5f + r * 0x1.555556p-3f);
  const vf low = x < -87.336545f ? vf{} : scale + scale * p;
  return x <= 88.71f ? low : x + __builtin_inff();  // FEXPA ends at 2^(128 - 1/64)
}

// 2^v by the same instruction. Below -127 the operand is held at -127, for which FEXPA gives an exact 0.
#define FM_HAS_EXP2
template <int N>
FM_INLINE void exp2_each(vf (&v)[N]) {
  constexpr float SHIFT = 0x1.803f8p17f;  // 1.5 * 2^17 + 127
  constexpr int HALF = half_of_chains(N);
  vf shifted[N], p[HALF];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) v[i] = (vf)svmax_n_f32_x(svptrue_b32(), (svfloat32_t)v[i], -127.0f);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) shifted[i] = v[i] + SHIFT;
#pragma GCC unroll 4
  for (int first = 0; first < N; first += HALF) {
#pragma GCC unroll 16
    for (int i = 0; i < HALF; ++i) p[i] = shifted[first + i] - SHIFT;
#pragma GCC unroll 16
    for (int i = 0; i < HALF; ++i) v[first + i] = v[first + i] - p[i];
#pragma GCC unroll 16
    for (int i = 0; i < HALF; ++i) p[i] = v[first + i] * 0x1.ebfc92p-3f + 0x1.62e486p-1f;
#pragma GCC unroll 16
    for (int i = first; i < first + HALF; ++i)
      shifted[i] = (vf)svexpa_f32((svuint32_t)(vu)shifted[i]);
#pragma GCC unroll 16
    for (int i = first; i < first + HALF; ++i) v[i] = v[i] * shifted[i];
#pragma GCC unroll 16
    for (int i = 0; i < HALF; ++i) v[first + i] = v[first + i] * p[i] + shifted[first + i];
  }
}

#define FM_HAS_FAST_MAX
FM_INLINE vf fast_max(vf a, vf b) {
  return (vf)svmax_f32_x(svptrue_b32(), (svfloat32_t)a, (svfloat32_t)b);
}
FM_INLINE vf fast_min(vf a, vf b) {
  return (vf)svmin_f32_x(svptrue_b32(), (svfloat32_t)a, (svfloat32_t)b);
}

// A store of the part's lanes where they would lie in a whole vector: no shuffle and no way through memory.
#define FM_HAS_STORE_PART
template <int N>
FM_INLINE void store_part(float* p, vf v, int q) {
  const svbool_t lanes = svbic_b_z(svptrue_b32(), first_lanes((q + 1) * N), first_lanes(q * N));
  svst1_f32(lanes, p - q * N, (svfloat32_t)v);
}

}  // namespace fm::FM_TARGET
