// SwiGLU: silu(gate) up, and its backward, which computes silu again. Storage float32, bfloat16 or float16, arithmetic float32.
//   silu(g) = g sigma(g),   sigma(g) = 1 / (1 + exp(-g))                                        (Shazeer, 2020)
//   dgate = dy up sigma(g) (1 + g (1 - sigma(g))),   dup = dy silu(g)
// Reference: reference_swiglu.cc. Tested by tests/kernels/test_swiglu.py.
#pragma once
#include "rowwise_blocks.h"

namespace fm::FM_TARGET {

FM_INLINE vf sigmoid(vf x) { return reciprocal(exp(-x) + 1.0f); }

// The rows of a block are independent chains of some twenty dependent instructions, as in gelu_rows.
template <int R, class T>
FM_INLINE void swiglu_rows(const SwiGLUArgs& a, int64_t row, T* y) {
  const T *gate = static_cast<const T*>(a.x) + row * a.x_row, *up = gate + a.x_part;
  for_vectors(0, a.cols, [&](int64_t i, int lanes) {
    vf v[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf g = load_lanes(gate + r * a.x_row + i, lanes);
      v[r] = g * sigmoid(g) * load_lanes(up + r * a.x_row + i, lanes);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store_lanes(y + (row + r) * a.cols + i, v[r], lanes);
  });
}

// dx may be x: both parts are read before either is written.
template <int R, class T>
FM_INLINE void swiglu_backward_rows(const SwiGLUArgs& a, const SwiGLUGradArgs& grad, int64_t row) {
  const T *gate = static_cast<const T*>(a.x) + row * a.x_row, *up = gate + a.x_part;
  const T* dy = static_cast<const T*>(grad.dy) + row * a.cols;
  T *dgate = static_cast<T*>(grad.dx) + row * grad.dx_row, *dup = dgate + grad.dx_part;
  for_vectors(0, a.cols, [&](int64_t i, int lanes) {
    vf to_gate[R], to_up[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf g = load_lanes(gate + r * a.x_row + i, lanes), d = load_lanes(dy + r * a.cols + i, lanes);
      const vf share = sigmoid(g), scaled = d * share;
      to_gate[r] = scaled * load_lanes(up + r * a.x_row + i, lanes) * (g * (1.0f - share) + 1.0f);
      to_up[r] = scaled * g;
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      store_lanes(dgate + r * grad.dx_row + i, to_gate[r], lanes);
      store_lanes(dup + r * grad.dx_row + i, to_up[r], lanes);
    }
  });
}

static void swiglu(const SwiGLUArgs& a, void* y) {
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(a.rows, row_grain(a.cols), [&](int64_t begin, int64_t end) {
      for_row_blocks(begin, end, [&](auto block, int64_t row) {
        swiglu_rows<decltype(block)::value>(a, row, static_cast<T*>(y));
      });
    });
  });
}

static void swiglu_backward(const SwiGLUArgs& a, const SwiGLUGradArgs& grad) {
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(a.rows, row_grain(a.cols), [&](int64_t begin, int64_t end) {
      for_row_blocks(begin, end, [&](auto block, int64_t row) {
        swiglu_backward_rows<decltype(block)::value, T>(a, grad, row);
      });
    });
  });
}

}  // namespace fm::FM_TARGET
