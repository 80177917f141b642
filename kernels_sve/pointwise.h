// GELU with the bias in front of it, sums over rows, and the small sums of training. Storage float32, bfloat16 or
// float16, arithmetic float32.
//   gelu(x) = x / 2 (1 + tanh(u)) = x sigma(2 u),   u = sqrt(2 / pi) (x + 0.044715 x^3)    (Hendrycks and Gimpel, 2016)
//   gelu'(x) = s + x s (1 - s) 2 u',   s = sigma(2 u) = 1 / (1 + exp(-2 u))
// Reference: reference_pointwise.cc. Tested by tests/kernels/test_pointwise.py.
#pragma once
#include "rowwise_blocks.h"

namespace fm::FM_TARGET {

constexpr float GELU_CUBIC = 0.044715f;
constexpr float GELU_TWO_K = 1.5957691216f;  // 2 sqrt(2 / pi)

// exp(-2 u)
FM_INLINE vf gelu_exp(vf x) { return exp(x * (x * x * (-GELU_TWO_K * GELU_CUBIC) - GELU_TWO_K)); }
FM_INLINE vf gelu_of(vf x) { return x * reciprocal(gelu_exp(x) + 1.0f); }
FM_INLINE vf gelu_slope(vf x) {
  const vf e = gelu_exp(x), s = reciprocal(e + 1.0f);
  const vf rest = min(broadcast(3.4028234e38f), e) * s;  // 1 - s, without cancellation; not inf * 0
  return s + x * s * rest * (x * x * (3 * GELU_TWO_K * GELU_CUBIC) + GELU_TWO_K);
}

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

template <int R, class T>
FM_INLINE void gelu_backward_rows(const T* dy, const T* x, const T* bias, T* dx, float* dbias, int64_t cols) {
  for_vectors(0, cols, [&](int64_t i, int lanes) {
    const vf b = load_or_zero(bias, i, lanes);
    vf grad[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      grad[r] = load_lanes(dy + r * cols + i, lanes) * gelu_slope(load_lanes(x + r * cols + i, lanes) + b);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store_lanes(dx + r * cols + i, grad[r], lanes);
    if (dbias) add_to(dbias + i, sum_of(grad), lanes);
  });
}

// bias and dbias may be null.
static void gelu_backward(const void* dy, const void* x, const void* bias, void* dx, float* dbias, DType dtype,
                          int64_t rows, int64_t cols) {
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    auto run = [&](int64_t begin, int64_t end, float* partial) {
      for_row_blocks(begin, end, [&](auto block, int64_t row) {
        const int64_t at = row * cols;
        gelu_backward_rows<decltype(block)::value>(static_cast<const T*>(dy) + at, static_cast<const T*>(x) + at,
                                                   static_cast<const T*>(bias), static_cast<T*>(dx) + at, partial,
                                                   cols);
      });
    };
    if (!dbias) {
      return parallel_for(rows, row_grain(cols), [&](int64_t begin, int64_t end) { run(begin, end, nullptr); });
    }
    float* const sums[1] = {dbias};
    with_column_sums<1>(rows, cols, sums,
                        [&](int64_t begin, int64_t end, float* partial, int64_t) { run(begin, end, partial); });
  });
}

// sum[column] += x[0][column] + x[1][column] + ...
static void column_sum(const void* x, DType dtype, float* sum, int64_t rows, int64_t cols) {
  with_dtype(dtype, [&](auto element) {
    const auto* from = static_cast<const decltype(element)*>(x);
    float* const sums[1] = {sum};
    with_column_sums<1>(rows, cols, sums, [&](int64_t begin, int64_t end, float* partial, int64_t) {
      for_row_blocks(begin, end, [&](auto block, int64_t row) {
        constexpr int R = decltype(block)::value;
        for_vectors(0, cols, [&](int64_t i, int lanes) {
          vf v[R];
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) v[r] = load_lanes(from + (row + r) * cols + i, lanes);
          add_to(partial + i, sum_of(v), lanes);
        });
      });
    });
  });
}

template <class F>
FM_INLINE void for_elements(int64_t n, const F& body) {
  parallel_for(n, 4096, [&](int64_t begin, int64_t end) { for_vectors(begin, end, body); });
}

static void add(const void* x, const void* y, void* out, DType dtype, int64_t n) {
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const T *a = static_cast<const T*>(x), *b = static_cast<const T*>(y);
    T* to = static_cast<T*>(out);
    for_elements(n, [&](int64_t i, int lanes) {
      store_lanes(to + i, load_lanes(a + i, lanes) + load_lanes(b + i, lanes), lanes);
    });
  });
}

// y += alpha x
static void axpy(float alpha, const void* x, DType x_dtype, void* y, DType y_dtype, int64_t n) {
  with_dtype(x_dtype, [&](auto x_element) {
    with_dtype(y_dtype, [&](auto y_element) {
      const auto* from = static_cast<const decltype(x_element)*>(x);
      auto* to = static_cast<decltype(y_element)*>(y);
      for_elements(n, [&](int64_t i, int lanes) {
        store_lanes(to + i, load_lanes(from + i, lanes) * alpha + load_lanes(to + i, lanes), lanes);
      });
    });
  });
}

// out[i] = scale (x[i] + x[stride + i] + ...) over `count` rows, added in order in float32.
static void sum_rows(const void* x, DType x_dtype, int64_t count, int64_t stride, void* out, DType out_dtype, int64_t n,
                     float scale) {
  with_dtype(x_dtype, [&](auto x_element) {
    with_dtype(out_dtype, [&](auto out_element) {
      const auto* from = static_cast<const decltype(x_element)*>(x);
      auto* to = static_cast<decltype(out_element)*>(out);
      for_elements(n, [&](int64_t i, int lanes) {
        vf sum = {};
        for (int64_t k = 0; k < count; ++k) sum += load_lanes(from + k * stride + i, lanes);
        store_lanes(to + i, sum * scale, lanes);
      });
    });
  });
}

}  // namespace fm::FM_TARGET
