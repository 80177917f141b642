// Transposition of VL x VL tiles of 32-bit lanes in registers, for packing. Tested through
// tests/kernels/test_attention.py and tests/kernels/test_gemm.py.
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

}  // namespace fm::FM_TARGET
