// Layer norm and RMS norm forward and backward, alone and behind Megatron's bias_dropout_add
// (r = residual + dropout(x + bias)), each in one pass over memory: a block of rows stays in cache while it is read again.
//   y = (x - mean) rstd weight + bias,   rstd = 1 / sqrt(variance + eps)                (Ba, Kiros and Hinton, 2016)
//   g = dy weight,  xhat = (x - mean) rstd
//   dx = rstd (g - mean(g) - xhat mean(g xhat)),   dweight += sum(dy xhat),   dbias += sum(dy)
// RMS norm leaves out mean, mean(g) and bias, so that rstd = 1 / sqrt(mean(x^2) + eps)     (Zhang and Sennrich, 2019)
// Storage float32, bfloat16 or float16, arithmetic float32. Reference: rowwise_reference.cc. Tested by
// tests/kernels/test_rowwise.py.
#pragma once
#include "rowwise/rowwise_blocks.h"
#include "rowwise/rowwise_dropout.h"

namespace fm::FM_TARGET {

enum class Norm { LAYER, RMS };

// x as the norm scales it; the mean of an RMS norm is not read.
template <Norm N>
FM_INLINE vf centred(vf x, float mean) {
  return N == Norm::LAYER ? x - mean : x;
}

template <Norm N, int R, class T>
FM_ONCE void norm_rows(const LayerNormArgs& a, int64_t row) {
  const int64_t cols = a.cols;
  const T* x = static_cast<const T*>(a.x) + row * cols;
  T* y = static_cast<T*>(a.y) + row * cols;
  const T *weight = static_cast<const T*>(a.weight), *bias = static_cast<const T*>(a.bias);
  const float inverse = 1.0f / static_cast<float>(cols);
  float mean[R] = {}, rstd[R];
  if constexpr (N == Norm::LAYER) {
    sum_over_columns<R>(cols, mean, [&](int r, int64_t i, int lanes) {
      return load_lanes(x + r * cols + i, lanes);
    });
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) a.mean[row + r] = mean[r] *= inverse;
  }
  sum_over_columns<R>(cols, rstd, [&](int r, int64_t i, int lanes) {
    const vf d = first_of(centred<N>(load_lanes(x + r * cols + i, lanes), mean[r]), lanes);
    return d * d;
  });
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) rstd[r] *= inverse;
  to_rstds<R>(rstd, a.eps);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) a.rstd[row + r] = rstd[r];
  for_vectors(0, cols, [&](int64_t i, int lanes) {
    const vf w = load_lanes(weight + i, lanes),
             b = N == Norm::LAYER ? load_lanes(bias + i, lanes) : vf{};
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf xhat = centred<N>(load_lanes(x + r * cols + i, lanes), mean[r]) * rstd[r];
      store_lanes(y + r * cols + i, N == Norm::LAYER ? xhat * w + b : xhat * w, lanes);
    }
  });
}

// Whether four rows of x fit the first-level cache next to the rest; a long row fills it alone, and its horizontal sums
// are cheap by comparison.
FM_INLINE bool short_rows(int64_t cols) { return cols <= Tuning::SHORT_ROW; }

template <Norm N, class T>
FM_INLINE void norm_range(const LayerNormArgs& a, int64_t begin, int64_t end) {
  if (short_rows(a.cols)) {
    for_row_blocks(begin, end, [&](auto block, int64_t row) {
      norm_rows<N, decltype(block)::value, T>(a, row);
    });
  } else {
    for (int64_t row = begin; row < end; ++row) norm_rows<N, 1, T>(a, row);
  }
}

template <Norm N>
static void norm(const LayerNormArgs& a) {
  with_dtype(a.dtype, [&](auto element) {
    parallel_for(a.rows, row_grain(a.cols), [&](int64_t begin, int64_t end) {
      norm_range<N, decltype(element)>(a, begin, end);
    });
  });
}

static void layer_norm(const LayerNormArgs& a) { norm<Norm::LAYER>(a); }
static void rms_norm(const LayerNormArgs& a) { norm<Norm::RMS>(a); }

// dweight, and for layer norm dbias: this chunk's column sums.
template <Norm N, int R, class T>
FM_ONCE void norm_backward_rows(const LayerNormGradArgs& a, int64_t row, float* dweight,
                                float* dbias) {
  const int64_t cols = a.cols, first = row * cols;
  const T *dy = static_cast<const T*>(a.dy) + first, *x = static_cast<const T*>(a.x) + first;
  const T *add = a.add ? static_cast<const T*>(a.add) + first : nullptr,
          *weight = static_cast<const T*>(a.weight);
  T* dx = static_cast<T*>(a.dx) + first;
  const float inverse = 1.0f / static_cast<float>(cols), *rstd = a.rstd + row;
  float mean[R] = {};
#pragma GCC unroll 4
  for (int r = 0; r < R && N == Norm::LAYER; ++r) mean[r] = a.mean[row + r];
  // Not x rstd - mean rstd, which would spare an operation: it loses the digits that x and mean share.
  auto xhat_at = [&](int r, int64_t i, int lanes) {
    return centred<N>(load_lanes(x + r * cols + i, lanes), mean[r]) * rstd[r];
  };
  vf g_sum[R] = {}, gx_sum[R] = {};
  for_vectors(0, cols, [&](int64_t i, int lanes) {
    const vf w = load_lanes(weight + i, lanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf g = load_lanes(dy + r * cols + i, lanes) * w;
      if constexpr (N == Norm::LAYER) g_sum[r] += g;
      gx_sum[r] += g * xhat_at(r, i, lanes);
    }
  });
  float of_xhat[R], constant[R];  // dx = rstd g + of_xhat xhat + constant
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    of_xhat[r] = -rstd[r] * inverse * hsum(gx_sum[r]);
    constant[r] = N == Norm::LAYER ? -rstd[r] * inverse * hsum(g_sum[r]) : 0.0f;
  }
  for_vectors(0, cols, [&](int64_t i, int lanes) {
    const vf w = load_lanes(weight + i, lanes);
    vf weight_sum = load_lanes(dweight + i, lanes),
       bias_sum = N == Norm::LAYER ? load_lanes(dbias + i, lanes) : vf{};
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vf d = load_lanes(dy + r * cols + i, lanes), xhat = xhat_at(r, i, lanes);
      vf grad = w * rstd[r] * d +
                (N == Norm::LAYER ? xhat * of_xhat[r] + constant[r] : xhat * of_xhat[r]);
      if (add) grad += load_lanes(add + r * cols + i, lanes);
      store_lanes(dx + r * cols + i, grad, lanes);
      weight_sum += d * xhat;
      bias_sum += d;
    }
    store_lanes(dweight + i, weight_sum, lanes);
    if constexpr (N == Norm::LAYER) store_lanes(dbias + i, bias_sum, lanes);
  });
}

template <Norm N>
static void norm_backward(const LayerNormGradArgs& a) {
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int K = N == Norm::LAYER ? 2 : 1;
    float* const sums[2] = {a.dweight, a.dbias};
    with_column_sums<K>(
        a.rows, a.cols, sums, [&](int64_t begin, int64_t end, float* partial, int64_t stride) {
          for_row_blocks(begin, end, [&](auto block, int64_t row) {
            norm_backward_rows<N, decltype(block)::value, T>(a, row, partial, partial + stride);
          });
        });
  });
}

static void layer_norm_backward(const LayerNormGradArgs& a) { norm_backward<Norm::LAYER>(a); }
static void rms_norm_backward(const LayerNormGradArgs& a) { norm_backward<Norm::RMS>(a); }

template <Norm N>
static void residual_norm(const ResidualArgs& sum, const LayerNormArgs& norm) {
  with_dtype(norm.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(norm.rows, row_grain(norm.cols), [&](int64_t begin, int64_t end) {
      for_row_blocks(begin, end, [&](auto block, int64_t row) {
        bias_dropout_add_rows<decltype(block)::value, T>(sum, row);
        norm_range<N, T>(norm, row, row + decltype(block)::value);
      });
    });
  });
}

static void bias_dropout_add_layer_norm(const ResidualArgs& sum, const LayerNormArgs& norm) {
  residual_norm<Norm::LAYER>(sum, norm);
}
static void bias_dropout_add_rms_norm(const ResidualArgs& sum, const LayerNormArgs& norm) {
  residual_norm<Norm::RMS>(sum, norm);
}

template <Norm N>
static void residual_norm_backward(const LayerNormGradArgs& norm, const ResidualGradArgs& sum) {
  with_dtype(norm.dtype, [&](auto element) {
    using T = decltype(element);
    float* const sums[3] = {norm.dweight, sum.dbias, norm.dbias};
    constexpr int K = N == Norm::LAYER ? 3 : 2;
    with_column_sums<K>(norm.rows, norm.cols, sums,
                        [&](int64_t begin, int64_t end, float* partial, int64_t stride) {
                          for_row_blocks(begin, end, [&](auto block, int64_t row) {
                            constexpr int R = decltype(block)::value;
                            norm_backward_rows<N, R, T>(norm, row, partial, partial + 2 * stride);
                            bias_dropout_add_backward_rows<R, T>(sum, row, partial + stride);
                          });
                        });
  });
}

static void bias_dropout_add_layer_norm_backward(const LayerNormGradArgs& norm,
                                                 const ResidualGradArgs& sum) {
  residual_norm_backward<Norm::LAYER>(norm, sum);
}
static void bias_dropout_add_rms_norm_backward(const LayerNormGradArgs& norm,
                                               const ResidualGradArgs& sum) {
  residual_norm_backward<Norm::RMS>(norm, sum);
}

}  // namespace fm::FM_TARGET
