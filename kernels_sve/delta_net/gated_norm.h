// The norm after the delta rule: an RMS norm of each head times a gate, y = x rstd weight silu(z), and its backward, which computes
// rstd again. With n = dy silu(z), g = n weight and xhat = x rstd:
//   dx = rstd (g - xhat mean(g xhat)),   dz = dy xhat weight silu'(z),   dweight += sum(n xhat)
// Storage float32, bfloat16 or float16, arithmetic float32. Reference: delta_net_reference.cc. Tested by
// tests/kernels/test_delta_net.py. Included by delta_net.h.
#pragma once
#include "rowwise/rowwise_blocks.h"

namespace fm::FM_TARGET {

FM_INLINE vf gate_sigmoid(vf z) {
  vf sigma[1] = {z * -LOG2_E};
  sigmoid_each(sigma);
  return sigma[0];
}

template <class T>
FM_INLINE const T* gate_row_of(const GatedNormArgs& a, int64_t row) {
  return static_cast<const T*>(a.gate) + row / a.heads * a.gate_row + row % a.heads * a.cols;
}

template <int R, class T>
FM_INLINE void row_rstds(const GatedNormArgs& a, const T* x, float (&rstd)[R]) {
  sum_over_columns<R>(a.cols, rstd, [&](int r, int64_t i, int lanes) {
    const vf v = load_lanes(x + r * a.cols + i, lanes);
    return v * v;
  });
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) rstd[r] /= static_cast<float>(a.cols);
  to_rstds<R>(rstd, a.eps);
}

static void gated_norm(const GatedNormArgs& a, void* y) {
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    const T* weight = static_cast<const T*>(a.weight);
    parallel_for(a.rows, row_grain(a.cols), [&](int64_t begin, int64_t end) {
      for_row_blocks(begin, end, [&](auto block, int64_t row) {
        constexpr int R = decltype(block)::value;
        const T* x = static_cast<const T*>(a.x) + row * a.cols;
        float rstd[R];
        row_rstds<R>(a, x, rstd);
        for (int r = 0; r < R; ++r) {
          const T* gate = gate_row_of<T>(a, row + r);
          T* out = static_cast<T*>(y) + (row + r) * a.cols;
          for_vectors(0, a.cols, [&](int64_t i, int lanes) {
            const vf z = load_lanes(gate + i, lanes);
            const vf normed =
                load_lanes(x + r * a.cols + i, lanes) * rstd[r] * load_lanes(weight + i, lanes);
            store_lanes(out + i, normed * (z * gate_sigmoid(z)), lanes);
          });
        }
      });
    });
  });
}

template <int R, class T>
FM_INLINE void gated_norm_backward_rows(const GatedNormArgs& a, const GatedNormGradArgs& grad,
                                        int64_t row, float* dweight) {
  const T *x = static_cast<const T*>(a.x) + row * a.cols,
          *dy = static_cast<const T*>(grad.dy) + row * a.cols,
          *weight = static_cast<const T*>(a.weight);
  T *dx = static_cast<T*>(grad.dx) + row * a.cols,
    *dgate = static_cast<T*>(grad.dgate) + row * a.cols;
  float rstd[R];
  row_rstds<R>(a, x, rstd);
  for (int r = 0; r < R; ++r) {
    const T* gate = gate_row_of<T>(a, row + r);
    const int64_t at = r * a.cols;
    vf sum = {};
    for_vectors(0, a.cols, [&](int64_t i, int lanes) {
      const vf z = load_lanes(gate + i, lanes), sigma = gate_sigmoid(z);
      const vf d = load_lanes(dy + at + i, lanes), w = load_lanes(weight + i, lanes);
      const vf xhat = load_lanes(x + at + i, lanes) * rstd[r], through = d * (z * sigma);
      sum += through * w * xhat;
      add_to(dweight + i, through * xhat, lanes);
      store_lanes(dgate + at + i, d * xhat * w * sigma * (z * (1.0f - sigma) + 1.0f), lanes);
    });
    const float along = hsum(sum) / static_cast<float>(a.cols);
    for_vectors(0, a.cols, [&](int64_t i, int lanes) {
      const vf z = load_lanes(gate + i, lanes), xhat = load_lanes(x + at + i, lanes) * rstd[r];
      const vf g =
          load_lanes(dy + at + i, lanes) * (z * gate_sigmoid(z)) * load_lanes(weight + i, lanes);
      store_lanes(dx + at + i, (g - xhat * along) * rstd[r], lanes);
    });
  }
}

static void gated_norm_backward(const GatedNormArgs& a, const GatedNormGradArgs& grad) {
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    float* const sums[1] = {grad.dweight};
    with_column_sums<1>(
        a.rows, a.cols, sums, [&](int64_t begin, int64_t end, float* partial, int64_t) {
          for_row_blocks(begin, end, [&](auto block, int64_t row) {
            gated_norm_backward_rows<decltype(block)::value, T>(a, grad, row, partial);
          });
        });
  });
}

}  // namespace fm::FM_TARGET
