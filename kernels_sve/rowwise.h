// Layer norm forward and backward, alone and behind Megatron's bias_dropout_add (r = residual + dropout(x + bias)),
// each in one pass over memory: a block of rows stays in cache while it is read again.
//   y = (x - mean) rstd weight + bias,   rstd = 1 / sqrt(variance + eps)                (Ba, Kiros and Hinton, 2016)
//   g = dy weight,  xhat = (x - mean) rstd
//   dx = rstd (g - mean(g) - xhat mean(g xhat)),   dweight += sum(dy xhat),   dbias += sum(dy)
// Storage float32, bfloat16 or float16, arithmetic float32. Reference: reference_rowwise.cc. Tested by
// tests/kernels/test_rowwise.py.
#pragma once
#include "rowwise_blocks.h"
#include "rowwise_dropout.h"

namespace fm::FM_TARGET {

// sum[r] = horizontal sum over the columns of f(r, i, lanes).
template <int R, class F>
FM_INLINE void sum_over_columns(int64_t cols, float (&sum)[R], const F& f) {
  constexpr int WAYS = 2;  // accumulators per row, against the latency of additions
  vf total[R][WAYS] = {};
  int64_t i = 0;
  for (; i + WAYS * VL <= cols; i += WAYS * VL) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int k = 0; k < WAYS; ++k) total[r][k] += f(r, i + k * VL, VL);
  }
  for_vectors(i, cols, [&](int64_t j, int lanes) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) total[r][0] += f(r, j, lanes);
  });
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sum[r] = hsum(total[r][0] + total[r][1]);
}

template <int R, class T>
FM_INLINE void layer_norm_rows(const LayerNormArgs& a, int64_t row) {
  const int64_t cols = a.cols;
  const T* x = static_cast<const T*>(a.x) + row * cols;
  T* y = static_cast<T*>(a.y) + row * cols;
  const T *weight = static_cast<const T*>(a.weight), *bias = static_cast<const T*>(a.bias);
  const float inverse = 1.0f / static_cast<float>(cols);
  float mean[R], rstd[R];
  sum_over_columns<R>(cols, mean, [&](int r, int64_t i, int lanes) { return load_lanes(x + r * cols + i, lanes); });
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) mean[r] *= inverse;
  sum_over_columns<R>(cols, rstd, [&](int r, int64_t i, int lanes) {
    const vf d = first_of(load_lanes(x + r * cols + i, lanes) - mean[r], lanes);
    return d * d;
  });
  vf variance = {};  // of all rows, for one reciprocal square root
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) variance[r] = rstd[r] * inverse + a.eps;
  const vf root = rsqrt(variance);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    rstd[r] = root[r];
    a.mean[row + r] = mean[r];
    a.rstd[row + r] = rstd[r];
  }
  for_vectors(0, cols, [&](int64_t i, int lanes) {
    const vf w = load_lanes(weight + i, lanes), b = load_lanes(bias + i, lanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf xhat = (load_lanes(x + r * cols + i, lanes) - mean[r]) * rstd[r];
      store_lanes(y + r * cols + i, xhat * w + b, lanes);
    }
  });
}

// Whether four rows of x fit the first-level cache next to the rest; a long row fills it alone, and its horizontal sums
// are cheap by comparison.
FM_INLINE bool short_rows(int64_t cols) { return cols <= Tuning::SHORT_ROW; }

template <class T>
FM_INLINE void layer_norm_range(const LayerNormArgs& a, int64_t begin, int64_t end) {
  if (short_rows(a.cols)) {
    for_row_blocks(begin, end, [&](auto block, int64_t row) { layer_norm_rows<decltype(block)::value, T>(a, row); });
  } else {
    for (int64_t row = begin; row < end; ++row) layer_norm_rows<1, T>(a, row);
  }
}

static void layer_norm(const LayerNormArgs& a) {
  with_dtype(a.dtype, [&](auto element) {
    parallel_for(a.rows, row_grain(a.cols),
                 [&](int64_t begin, int64_t end) { layer_norm_range<decltype(element)>(a, begin, end); });
  });
}

// dweight and dbias: this chunk's column sums.
template <int R, class T>
FM_INLINE void layer_norm_backward_rows(const LayerNormGradArgs& a, int64_t row, float* dweight, float* dbias) {
  const int64_t cols = a.cols, first = row * cols;
  const T *dy = static_cast<const T*>(a.dy) + first, *x = static_cast<const T*>(a.x) + first;
  const T *add = a.add ? static_cast<const T*>(a.add) + first : nullptr, *weight = static_cast<const T*>(a.weight);
  T* dx = static_cast<T*>(a.dx) + first;
  const float inverse = 1.0f / static_cast<float>(cols), *mean = a.mean + row, *rstd = a.rstd + row;
  // Not x rstd - mean rstd, which would spare an operation: it loses the digits that x and mean share.
  auto xhat_at = [&](int r, int64_t i, int lanes) { return (load_lanes(x + r * cols + i, lanes) - mean[r]) * rstd[r]; };
  vf g_sum[R] = {}, gx_sum[R] = {};
  for_vectors(0, cols, [&](int64_t i, int lanes) {
    const vf w = load_lanes(weight + i, lanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf g = load_lanes(dy + r * cols + i, lanes) * w;
      g_sum[r] += g;
      gx_sum[r] += g * xhat_at(r, i, lanes);
    }
  });
  float of_xhat[R], constant[R];  // dx = rstd g + of_xhat xhat + constant
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    of_xhat[r] = -rstd[r] * inverse * hsum(gx_sum[r]);
    constant[r] = -rstd[r] * inverse * hsum(g_sum[r]);
  }
  for_vectors(0, cols, [&](int64_t i, int lanes) {
    const vf w = load_lanes(weight + i, lanes);
    vf weight_sum = load_lanes(dweight + i, lanes), bias_sum = load_lanes(dbias + i, lanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf d = load_lanes(dy + r * cols + i, lanes), xhat = xhat_at(r, i, lanes);
      vf grad = w * rstd[r] * d + (xhat * of_xhat[r] + constant[r]);
      if (add) grad += load_lanes(add + r * cols + i, lanes);
      store_lanes(dx + r * cols + i, grad, lanes);
      weight_sum += d * xhat;
      bias_sum += d;
    }
    store_lanes(dweight + i, weight_sum, lanes);
    store_lanes(dbias + i, bias_sum, lanes);
  });
}

static void layer_norm_backward(const LayerNormGradArgs& a) {
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    float* const sums[2] = {a.dweight, a.dbias};
    with_column_sums<2>(a.rows, a.cols, sums, [&](int64_t begin, int64_t end, float* partial, int64_t stride) {
      for_row_blocks(begin, end, [&](auto block, int64_t row) {
        layer_norm_backward_rows<decltype(block)::value, T>(a, row, partial, partial + stride);
      });
    });
  });
}

static void bias_dropout_add_layer_norm(const ResidualArgs& sum, const LayerNormArgs& norm) {
  with_dtype(norm.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(norm.rows, row_grain(norm.cols), [&](int64_t begin, int64_t end) {
      for_row_blocks(begin, end, [&](auto block, int64_t row) {
        bias_dropout_add_rows<decltype(block)::value, T>(sum, row);
        layer_norm_range<T>(norm, row, row + decltype(block)::value);
      });
    });
  });
}

static void bias_dropout_add_layer_norm_backward(const LayerNormGradArgs& norm, const ResidualGradArgs& sum) {
  with_dtype(norm.dtype, [&](auto element) {
    using T = decltype(element);
    float* const sums[3] = {norm.dweight, norm.dbias, sum.dbias};
    with_column_sums<3>(norm.rows, norm.cols, sums, [&](int64_t begin, int64_t end, float* partial, int64_t stride) {
      for_row_blocks(begin, end, [&](auto block, int64_t row) {
        constexpr int R = decltype(block)::value;
        layer_norm_backward_rows<R, T>(norm, row, partial, partial + stride);
        bias_dropout_add_backward_rows<R, T>(sum, row, partial + 2 * stride);
      });
    });
  });
}

}  // namespace fm::FM_TARGET
