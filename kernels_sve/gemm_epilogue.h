// What follows the product while a tile of C is still in the first-level cache: bias, GELU, its derivative, residual,
// conversion. GELU is the tanh form, x sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x^3) (Hendrycks and Gimpel, 2016).
#pragma once
#include "gelu.h"
#include "gemm_micro.h"

namespace fm::FM_TARGET {

FM_INLINE vf gelu_sigmoid(vf x) { return reciprocal(1.0f + exp(-GELU_SCALE * (x + GELU_CUBE * (x * x * x)))); }
FM_INLINE vf gelu(vf x) { return x * gelu_sigmoid(x); }
FM_INLINE vf gelu_derivative(vf x) {
  const vf s = gelu_sigmoid(x);
  const vf slope = GELU_SCALE + (3.0f * GELU_SCALE * GELU_CUBE) * (x * x);
  // Where s is 0 or 1 the second term is 0, also when x * slope overflows.
  const vf t = s * (1.0f - s);
  return s + (t == 0.0f ? t : x * slope * t);
}

FM_INLINE bool has_epilogue(const GemmArgs& g) { return g.bias || g.pre || g.gelu || g.gelu_input || g.residual; }

// One vector of C at (row, col), `lanes` of it valid.
template <class T>
FM_INLINE vf epilogue(const GemmArgs& g, vf v, int64_t row, int64_t col, int lanes) {
  if (g.bias) v += load_lanes(static_cast<const T*>(g.bias) + col, lanes);
  if (g.pre) store_lanes(static_cast<T*>(g.pre) + row * g.pre_row + col, v, lanes);
  if (g.gelu) v = gelu(v);
  if (g.gelu_input)
    v *= gelu_derivative(load_lanes(static_cast<const T*>(g.gelu_input) + row * g.gelu_input_row + col, lanes));
  if (g.residual) v += load_lanes(static_cast<const T*>(g.residual) + row * g.residual_row + col, lanes);
  return v;
}

// tile: rows x COLUMNS sums of the last block of k. partial: the sums of the blocks before, or null.
template <class T, int COLUMNS>
static void finish_tile(const GemmArgs& g, const float* tile, const float* partial, int64_t partial_row, int64_t row,
                        int64_t rows, int64_t col, int64_t cols) {
  T* c = static_cast<T*>(g.c) + row * g.c_row + col;
  for (int64_t r = 0; r < rows; ++r) {
    for_vectors(0, cols, [&](int64_t j, int lanes) {
      vf v = load_aligned(tile + r * COLUMNS + j);
      if (partial) v += load_lanes(partial + r * partial_row + j, lanes);
      store_lanes(c + r * g.c_row + j, epilogue<T>(g, v, row + r, col + j, lanes), lanes);
    });
  }
}

}  // namespace fm::FM_TARGET
