// Transposition of VL x VL tiles of 32-bit lanes in registers, for packing, and sums of the lanes of four vectors. Tested through
// tests/kernels/test_attention.py, test_attention_decode.py and test_gemm.py.
#pragma once
#include <utility>

#include "simd/simd.h"

namespace fm::FM_TARGET {

template <size_t... I>
FM_INLINE vf zip_low(vf a, vf b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, (I / 2 + I % 2 * VL)...);
}
template <size_t... I>
FM_INLINE vf zip_high(vf a, vf b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, (VL / 2 + I / 2 + I % 2 * VL)...);
}

// Rows of a VL x VL block become its columns: log2(VL) perfect shuffles of the rows.
FM_INLINE void transpose(vf (&rows)[VL]) {
  using Lanes = std::make_index_sequence<VL>;
#pragma GCC unroll 8
  for (int stage = 1; stage < VL; stage *= 2) {
    vf next[VL];
#pragma GCC unroll 32
    for (int i = 0; i < VL / 2; ++i) {
      next[2 * i] = zip_low(rows[i], rows[i + VL / 2], Lanes());
      next[2 * i + 1] = zip_high(rows[i], rows[i + VL / 2], Lanes());
    }
#pragma GCC unroll 32
    for (int i = 0; i < VL; ++i) rows[i] = next[i];
  }
}

template <int N, size_t... I>
FM_INLINE vf even_runs(vf a, vf b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, (I - I / N % 2 * N + I / N % 2 * VL)...);
}
template <int N, size_t... I>
FM_INLINE vf odd_runs(vf a, vf b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, (I + N - I / N % 2 * N + I / N % 2 * VL)...);
}
// Of each two runs of N lanes the sum, of a and b in turn.
template <int N>
FM_INLINE vf add_runs(vf a, vf b) {
  using Lanes = std::make_index_sequence<VL>;
  return even_runs<N>(a, b, Lanes()) + odd_runs<N>(a, b, Lanes());
}
template <int N, size_t... I>
FM_INLINE vf rotated(vf v, std::index_sequence<I...>) {
  return __builtin_shufflevector(v, v, ((I + N) % VL)...);
}
// combine(x, y) over every fourth lane, in all of them.
template <int N = VL / 2, class F>
FM_INLINE vf over_fours(vf v, const F& combine) {
  if constexpr (N >= 4)
    return over_fours<N / 2>(combine(v, rotated<N>(v, std::make_index_sequence<VL>())), combine);
  return v;
}
// Lane i: the sum of the lanes of rows[i % 4].
FM_INLINE vf sum_four(const vf (&rows)[4]) {
  const vf sums = add_runs<2>(add_runs<1>(rows[0], rows[1]), add_runs<1>(rows[2], rows[3]));
  return over_fours(sums, [](vf a, vf b) { return a + b; });
}

}  // namespace fm::FM_TARGET
