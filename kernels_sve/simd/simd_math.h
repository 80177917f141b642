// Polynomial functions on vf that need no instruction set: exp where no hook has one, log and sin/cos for Box-Muller.
// Included by simd.h. Polynomials: Cephes single precision (expf, logf, sinf, cosf), S. Moshier.
#pragma once

namespace fm::FM_TARGET {

#ifndef FM_HAS_DOT_SHORTS
FM_INLINE vi dot_shorts(vi sum, vu a, vu b) {
  const vi even = ((vi)(a << 16) >> 16) * ((vi)(b << 16) >> 16);
  return sum + even + ((vi)a >> 16) * ((vi)b >> 16);
}
#endif

constexpr float LOG2_E = 1.44269504f;
constexpr float EXP_LOW = -87.336545f;  // ln of the smallest normal number
constexpr float EXP_HIGH = 88.722836f;  // ln of the largest number

#ifndef FM_HAS_EXP
FM_INLINE vf exp(vf x) {
  constexpr float SHIFT = 0x1.8p23f;
  const vf shifted = x * LOG2_E + SHIFT;
  const vf n = shifted - SHIFT;
  const vf r = x - n * 0.693359375f - n * -2.12194440e-4f;
  vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^n by adding n to the exponent: p is in [0.70, 1.42], so the sum stays a normal number on all of [EXP_LOW,
  // EXP_HIGH].
  const vf scaled = (vf)((vu)p + ((vu)shifted << 23));
  const vf low = x < EXP_LOW ? vf{} : scaled;
  return x <= EXP_HIGH ? low : x + __builtin_inff();  // inf, or the NaN itself
}
#endif

#ifndef FM_HAS_EXP2
template <int N>
FM_INLINE void exp2_each(vf (&v)[N]) {
  constexpr float SHIFT = 0x1.8p23f;
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    const vf shifted = v[i] + SHIFT;
    const vf scaled = (vf)((vu)exp2_of_rest(v[i] - (shifted - SHIFT)) + ((vu)shifted << 23));
    v[i] = v[i] < -126.0f ? vf{} : scaled;
  }
}
#endif

#ifndef FM_HAS_FAST_MAX
FM_INLINE vf fast_max(vf a, vf b) { return max(a, b); }
FM_INLINE vf fast_min(vf a, vf b) { return min(a, b); }
#endif

#ifndef FM_HAS_NEWTON_STEPS
template <int N>
FM_INLINE void reciprocal_each(vf (&v)[N]) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) v[i] = reciprocal(v[i]);
}
template <int N>
FM_INLINE void sqrt_each(vf (&v)[N]) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) v[i] = sqrt(v[i]);
}
#endif

// 1 / (1 + 2^v) in place, which is sigma(x) for v = -x log2(e): 0 below 2.4e-38, so that no denormal depends on the mode of the
// thread, and NaN stays. N chains of some twenty dependent instructions side by side.
template <int N>
FM_INLINE void sigmoid_each(vf (&v)[N]) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) v[i] = fast_min(broadcast(125.0f), v[i]);
  exp2_each(v);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) v[i] = v[i] + 1.0f;
  reciprocal_each(v);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) v[i] = v[i] < 2.4e-38f ? vf{} : v[i];
}

#ifndef FM_HAS_STORE_PART
template <int N>
FM_INLINE void store_part(float* p, vf v, int q) {
  alignas(FM_VECTOR_BYTES) float words[VL];
  store_aligned(words, v);
  __builtin_memcpy(p, words + q * N, N * sizeof(float));
}
#endif

// Natural logarithm of positive normal numbers.
FM_INLINE vf log(vf x) {
  const vu bits = (vu)x;
  vf m = (vf)((bits & 0x007fffffu) | 0x3f000000u);  // [0.5, 1)
  const vi small = m < 0.707106781f;
  const vf e = __builtin_convertvector((vi)(bits >> 23) - 126 + small, vf);
  m = (small ? m + m : m) - 1.0f;
  const vf z = m * m;
  vf p = m * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const vf tail = p * m * z + e * -2.12194440e-4f - 0.5f * z;
  return m + tail + e * 0.693359375f;
}

// sin and cos of 2 pi turns, 0 <= turns < 1.
FM_INLINE void sincos_turns(vf turns, vf& sine, vf& cosine) {
  constexpr float SHIFT = 0x1.8p23f;
  const vf shifted = turns * 4.0f + SHIFT;
  const vu quadrant = (vu)shifted;
  const vf t = (turns * 4.0f - (shifted - SHIFT)) * 1.57079633f;  // [-pi/4, pi/4]
  const vf z = t * t;
  const vf s = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f) * z * t + t;
  const vf c =
      ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z -
      0.5f * z + 1.0f;
  const vi swap = (quadrant & 1u) != 0u;
  sine = (vf)((vu)(swap ? c : s) ^ ((quadrant & 2u) << 30));
  cosine = (vf)((vu)(swap ? s : c) ^ (((quadrant + 1u) & 2u) << 30));
}

}  // namespace fm::FM_TARGET
