// GELU with the bias in front of it. Storage float32, bfloat16 or float16, arithmetic float32.
//   gelu(x) = x / 2 (1 + tanh(u)) = x sigma(2 u),   u = sqrt(2 / pi) (x + 0.044715 x^3)    (Hendrycks and Gimpel, 2016)
// The derivative is part of the products that it follows (gemm_epilogue.h). Reference: reference_gelu.cc. Tested by
// tests/kernels/test_gelu.py.
#pragma once
#include "rowwise_blocks.h"

namespace fm::FM_TARGET {

constexpr float GELU_CUBE = 0.044715f;
constexpr float GELU_SCALE = 1.5957691216f;  // 2 sqrt(2 / pi)

// exp(-2 u)
FM_INLINE vf gelu_exp(vf x) { return exp(x * (x * x * (-GELU_SCALE * GELU_CUBE) - GELU_SCALE)); }
FM_INLINE vf gelu_of(vf x) { return x * reciprocal(gelu_exp(x) + 1.0f); }
template <class T>
FM_INLINE vf load_or_zero(const T* p, int64_t i, int lanes) {
  return p ? load_lanes(p + i, lanes) : vf{};
}

// The rows of a block are independent chains of some twenty dependent instructions, worked on in turn.
template <int R, class T>
FM_INLINE void gelu_rows(const T* x, const T* bias, T* y, int64_t cols) {
  for_vectors(0, cols, [&](int64_t i, int lanes) {
    const vf b = load_or_zero(bias, i, lanes);
    vf v[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) v[r] = gelu_of(load_lanes(x + r * cols + i, lanes) + b);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store_lanes(y + r * cols + i, v[r], lanes);
  });
}

// bias may be null.
static void gelu(const void* x, const void* bias, void* y, DType dtype, int64_t rows, int64_t cols) {
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(rows, row_grain(cols), [&](int64_t begin, int64_t end) {
      for_row_blocks(begin, end, [&](auto block, int64_t row) {
        gelu_rows<decltype(block)::value>(static_cast<const T*>(x) + row * cols, static_cast<const T*>(bias),
                                          static_cast<T*>(y) + row * cols, cols);
      });
    });
  });
}

}  // namespace fm::FM_TARGET
