// GELU with the bias in front of it. Storage float32, bfloat16 or float16, arithmetic float32.
//   gelu(x) = x / 2 (1 + tanh(u)) = x sigma(2 u),   u = sqrt(2 / pi) (x + 0.044715 x^3)    (Hendrycks and Gimpel, 2016)
// with sigma(2 u) = 1 / (1 + 2^(-2 u log2(e))). The derivative is part of the products that it follows (gemm_epilogue.h).
// Reference: reference_gelu.cc. Tested by tests/kernels/test_gelu.py.
#pragma once
#include "rowwise_blocks.h"

namespace fm::FM_TARGET {

constexpr float GELU_CUBE = 0.044715f;
constexpr float GELU_SCALE = 1.5957691216f;  // 2 sqrt(2 / pi)

// sigma(2 u).
template <int N>
FM_INLINE void gelu_sigmoid(const vf (&x)[N], vf (&s)[N]) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) s[i] = x[i] * x[i];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) s[i] = s[i] * (-GELU_SCALE * GELU_CUBE * LOG2_E) - GELU_SCALE * LOG2_E;
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) s[i] = s[i] * x[i];
  sigmoid_each(s);
}

// gelu(x) in place.
template <int N>
FM_INLINE void gelu_each(vf (&x)[N]) {
  vf s[N];
  gelu_sigmoid(x, s);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) x[i] = x[i] * s[i];
}

FM_INLINE vf gelu_of(vf x) {
  vf one[1] = {x};
  gelu_each(one);
  return one[0];
}

// Its derivative in place. Where sigma is 0 or 1 the second term is 0, also when x * slope overflows.
template <int N>
FM_INLINE void gelu_derivative_each(vf (&x)[N]) {
  vf s[N], slope[N];
  gelu_sigmoid(x, s);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) slope[i] = x[i] * x[i];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) slope[i] = slope[i] * (3.0f * GELU_SCALE * GELU_CUBE) + GELU_SCALE;
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) slope[i] = slope[i] * x[i];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) x[i] = s[i] * (1.0f - s[i]);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) slope[i] = x[i] == 0.0f ? x[i] : slope[i] * x[i];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) x[i] = slope[i] + s[i];
}

template <class T>
FM_INLINE vf load_or_zero(const T* p, int64_t i, int lanes) {
  return p ? load_lanes(p + i, lanes) : vf{};
}

template <int R, class T>
FM_INLINE void gelu_rows(const T* x, int64_t x_row, const T* bias, T* y, int64_t cols) {
  for_vector_groups<CHAINS / R>(0, cols, [&](auto count, int64_t i, int lanes) FM_INLINE_LAMBDA {
    constexpr int K = decltype(count)::value;  // vectors of a row
    vf v[R * K];
#pragma GCC unroll 16
    for (int n = 0; n < R * K; ++n) {
      const int64_t at = i + n % K * VL;
      v[n] = load_lanes(x + n / K * x_row + at, lanes) + load_or_zero(bias, at, lanes);
    }
    gelu_each(v);
#pragma GCC unroll 16
    for (int n = 0; n < R * K; ++n) store_lanes(y + n / K * cols + i + n % K * VL, v[n], lanes);
  });
}

// Rows of x begin x_row elements apart, those of y lie side by side. bias may be null.
static void gelu(const void* x, int64_t x_row, const void* bias, void* y, DType dtype, int64_t rows, int64_t cols) {
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(rows, row_grain(cols), [&](int64_t begin, int64_t end) {
      for_row_blocks(begin, end, [&](auto block, int64_t row) {
        gelu_rows<decltype(block)::value>(static_cast<const T*>(x) + row * x_row, x_row, static_cast<const T*>(bias),
                                          static_cast<T*>(y) + row * cols, cols);
      });
    });
  });
}

}  // namespace fm::FM_TARGET
