// What follows the product while a tile of C is still in the first-level cache: bias, activation, its derivative,
// residual, conversion.
#pragma once
#include "rowwise/activation.h"
#include "gemm/gemm_micro.h"

namespace fm::FM_TARGET {

FM_INLINE bool has_epilogue(const GemmArgs& g) {
  return g.bias || g.pre || g.activation != Activation::none || g.residual;
}

struct NoActivation {
  template <int N>
  FM_INLINE void value_each(vf (&)[N]) {}
  template <int N>
  FM_INLINE void slope_each(vf (&)[N]) {}
};

// R rows of K vectors of C from (row, col) on; the vectors have `lanes` valid lanes. F: the activation.
template <class F, class T, int R, int K>
FM_INLINE void epilogue(const GemmArgs& g, vf (&v)[R * K], int64_t row, int64_t col, int lanes) {
  const auto for_all = [&](auto* p, int64_t stride, const auto& body) FM_INLINE_LAMBDA {
#pragma GCC unroll 16
    for (int n = 0; n < R * K; ++n) body(n, p + (row + n / K) * stride + col + n % K * VL);
  };
  if (g.bias)
    for_all(static_cast<const T*>(g.bias), 0,
            [&](int n, const T* p) { v[n] += load_lanes(p, lanes); });
  if (g.pre)
    for_all(static_cast<T*>(g.pre), g.pre_row, [&](int n, T* p) { store_lanes(p, v[n], lanes); });
  if (g.activation_input) {
    vf x[R * K];
    for_all(static_cast<const T*>(g.activation_input), g.activation_input_row,
            [&](int n, const T* p) { x[n] = load_lanes(p, lanes); });
    F::slope_each(x);
#pragma GCC unroll 16
    for (int n = 0; n < R * K; ++n) v[n] *= x[n];
  } else {
    F::value_each(v);
  }
  if (g.residual) {
    for_all(static_cast<const T*>(g.residual), g.residual_row,
            [&](int n, const T* p) { v[n] += load_lanes(p, lanes); });
  }
}

// tile: rows x COLUMNS sums of the last block of k. partial: the sums of the blocks before, or null.
template <class F, class T, int COLUMNS>
static void finish_tile(const GemmArgs& g, const float* tile, const float* partial,
                        int64_t partial_row, int64_t row, int64_t rows, int64_t col, int64_t cols) {
  T* c = static_cast<T*>(g.c) + row * g.c_row + col;
  const auto finish = [&](auto row_count, auto count, int64_t r, int64_t j,
                          int lanes) FM_INLINE_LAMBDA {
    constexpr int R = decltype(row_count)::value, K = decltype(count)::value;
    vf v[R * K];
#pragma GCC unroll 16
    for (int n = 0; n < R * K; ++n) {
      const int64_t i = r + n / K, at = j + n % K * VL;
      v[n] = load_aligned(tile + i * COLUMNS + at);
      if (partial) v[n] += load_lanes(partial + i * partial_row + at, lanes);
    }
    epilogue<F, T, R, K>(g, v, row + r, col + j, lanes);
#pragma GCC unroll 16
    for (int n = 0; n < R * K; ++n)
      store_lanes(c + (r + n / K) * g.c_row + j + n % K * VL, v[n], lanes);
  };
  constexpr int VECTORS = COLUMNS / VL, TOGETHER = CHAINS > VECTORS ? CHAINS / VECTORS : 1;
  int64_t r = 0;
  for (; cols == COLUMNS && r + TOGETHER <= rows; r += TOGETHER)
    finish(Count<TOGETHER>(), Count<VECTORS>(), r, 0, VL);
  for (; r < rows; ++r) {
    for_vectors(0, cols,
                [&](int64_t j, int lanes) { finish(Count<1>(), Count<1>(), r, j, lanes); });
  }
}

}  // namespace fm::FM_TARGET
