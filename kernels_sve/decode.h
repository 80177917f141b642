// What a step of generation does with a few new tokens, where reading the weights takes the time.
//
//   linear_few_rows(args)     y = f(x W^T + bias) for a few rows of x, W read once and as it lies
//
// A GEMM packs W first, and its tiles have more rows than there are. Here every product is a dot product along a row of W, summed in
// float32 lanes from the first k to the last, so its bits depend neither on threads nor on the number of rows. Reference:
// reference_decode.cc. Tested by tests/kernels/test_decode.py, timed by python -m benchmarks decode.
#pragma once
#include "gelu.h"

namespace fm::FM_TARGET {

constexpr int DOT_ROWS = Tuning::DOT_ROWS, DOT_TOKENS = 4;  // rows of W, and of x, whose products are formed together

// sums[m * stride + r] = w row r . x row m, for R rows of W and M of x, k columns each.
template <int R, int M, class T>
FM_INLINE void dot_products(const T* w, int64_t w_row, const T* x, int64_t x_row, int64_t k, float* sums,
                            int64_t stride) {
  vf sum[R][M] = {};
  for_vectors(0, k, [&](int64_t i, int lanes) {
    vf row[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) row[r] = load_lanes(w + r * w_row + i, lanes);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const vf v = load_lanes(x + m * x_row + i, lanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r][m] = row[r] * v + sum[r][m];
    }
  });
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[m * stride + r] = hsum(sum[r][m]);
  }
}

// Columns [begin, begin + R) of all rows of y, before the bias. The rows of W stay in L1 from one M rows of x to the next.
template <int R, class T>
FM_INLINE void few_columns(const FewRowsArgs& a, int64_t begin, float* sums, int64_t stride) {
  const T* w = static_cast<const T*>(a.weight) + begin * a.weight_row;
  const T* x = static_cast<const T*>(a.x);
  int64_t m = 0;
  for (; m + DOT_TOKENS <= a.m; m += DOT_TOKENS)
    dot_products<R, DOT_TOKENS>(w, a.weight_row, x + m * a.x_row, a.x_row, a.k, sums + m * stride, stride);
  for (; m < a.m; ++m) dot_products<R, 1>(w, a.weight_row, x + m * a.x_row, a.x_row, a.k, sums + m * stride, stride);
}

template <class T>
FM_INLINE void few_rows_range(const FewRowsArgs& a, int64_t begin, int64_t end) {
  const int64_t stride = end - begin;
  float* sums = static_cast<float*>(scratch(0, a.m * stride * sizeof(float)));
  int64_t j = begin;
  for (; j + DOT_ROWS <= end; j += DOT_ROWS) few_columns<DOT_ROWS, T>(a, j, sums + (j - begin), stride);
  for (; j < end; ++j) few_columns<1, T>(a, j, sums + (j - begin), stride);
  const T* bias = a.bias ? static_cast<const T*>(a.bias) + begin : nullptr;
  for (int64_t m = 0; m < a.m; ++m) {
    T* y = static_cast<T*>(a.out) + m * a.out_row + begin;
    for_vectors(0, stride, [&](int64_t i, int lanes) {
      const vf v = load_lanes(sums + m * stride + i, lanes) + load_or_zero(bias, i, lanes);
      store_lanes(y + i, a.gelu ? gelu_of(v) : v, lanes);
    });
  }
}

static void linear_few_rows(const FewRowsArgs& args) {
  if (!args.m) return;
  with_dtype(args.dtype, [&](auto element) {
    parallel_for(args.n, DOT_ROWS * (1 + Tuning::GRAIN / DOT_ROWS / (args.k + 1)), [&](int64_t begin, int64_t end) {
      few_rows_range<decltype(element)>(args, begin, end);
    });
  });
}

}  // namespace fm::FM_TARGET
