// Transposition of VL x VL tiles of 32-bit lanes in registers, and the copies between row-major matrices and panels
// that are built on it. Portable: one perfect shuffle (zip) of two vectors, log2(VL) times.
// Leaves out: matrices whose rows are not contiguous. Tested through attention by tests/kernels/test_attention.py.
#pragma once
#include "simd.h"

namespace fm::FM_TARGET {

#if FM_VECTOR_BYTES == 64
#define FM_ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define FM_ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif FM_VECTOR_BYTES == 32
#define FM_ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define FM_ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define FM_ZIP_LOW 0, 4, 1, 5
#define FM_ZIP_HIGH 2, 6, 3, 7
#endif

FM_INLINE vf zip_low(vf a, vf b) { return __builtin_shufflevector(a, b, FM_ZIP_LOW); }
FM_INLINE vf zip_high(vf a, vf b) { return __builtin_shufflevector(a, b, FM_ZIP_HIGH); }

// Each round rotates the bits of (row, lane) by one; after log2(VL) rounds they have changed places.
FM_INLINE void transpose(vf (&rows)[VL]) {
#pragma GCC unroll 4
  for (int width = 1; width < VL; width *= 2) {
    vf next[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL / 2; ++i) {
      next[2 * i] = zip_low(rows[i], rows[i + VL / 2]);
      next[2 * i + 1] = zip_high(rows[i], rows[i + VL / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < VL; ++i) rows[i] = next[i];
  }
}

}  // namespace fm::FM_TARGET
