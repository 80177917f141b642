// What a step of generation does with a few new tokens, where reading the weights takes the time.
//
//   linear_few_rows(args)     y = f(x W^T + bias) for a few rows of x, W read once and as it lies
//
// A GEMM packs W first, and its tiles have more rows than there are. Here every product is a dot product along a row of W, one row after
// another as memory has them, summed in float32 lanes, so its bits depend neither on threads nor on the number of rows. Reference:
// reference_decode.cc. Tested by tests/kernels/test_decode.py, timed by python -m benchmarks decode.
#pragma once
#include "rowwise/activation.h"

namespace fm::FM_TARGET {

constexpr int DOT_CHAINS = Tuning::DOT_CHAINS,
              DOT_TOKENS = 4;  // sums of a product side by side; rows of x at once

// total[m] = lanes of w . x row m, for M rows of x, k columns each.
template <int M, class T>
FM_INLINE void dot_products(const T* w, const T* x, int64_t x_row, int64_t k, vf* total) {
  vf sum[M][DOT_CHAINS] = {};
  for_vector_groups<DOT_CHAINS>(0, k, [&](auto count, int64_t i, int lanes) FM_INLINE_LAMBDA {
#pragma GCC unroll 4
    for (int c = 0; c < decltype(count)::value; ++c) {
      prefetch_ahead<Tuning::DOT_AHEAD>(w + i + c * VL);
      const vf row = load_lanes(w + i + c * VL, lanes);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m)
        sum[m][c] = row * load_lanes(x + m * x_row + i + c * VL, lanes) + sum[m][c];
    }
  });
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    total[m] = sum[m][0];
#pragma GCC unroll 4
    for (int c = 1; c < DOT_CHAINS; ++c) total[m] += sum[m][c];
  }
}

// Columns [begin, begin + R) of M rows of y, before the bias; R horizontal sums overlap.
template <int R, int M, class T>
FM_INLINE void few_columns(const FewRowsArgs& a, int64_t begin, const T* x, float* sums,
                           int64_t stride) {
  vf total[R][M];
  for (int r = 0; r < R; ++r) {
    dot_products<M>(static_cast<const T*>(a.weight) + (begin + r) * a.weight_row, x, a.x_row, a.k,
                    total[r]);
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[m * stride + r] = hsum(total[r][m]);
  }
}

// The same of all rows of y. The rows of W stay in L1 from one M rows of x to the next.
template <int R, class T>
FM_INLINE void all_rows(const FewRowsArgs& a, int64_t begin, float* sums, int64_t stride) {
  const T* x = static_cast<const T*>(a.x);
  int64_t m = 0;
  for (; m + DOT_TOKENS <= a.m; m += DOT_TOKENS)
    few_columns<R, DOT_TOKENS>(a, begin, x + m * a.x_row, sums + m * stride, stride);
  for (; m < a.m; ++m) few_columns<R, 1>(a, begin, x + m * a.x_row, sums + m * stride, stride);
}

// `a` is a copy: behind a reference its fields are read again for every row, after stores that wait for the row's sums.
template <class T>
FM_INLINE void few_rows_range(const FewRowsArgs a, int64_t begin, int64_t end) {
  const int64_t stride = end - begin;
  float* sums = static_cast<float*>(scratch(0, a.m * stride * sizeof(float)));
  int64_t j = begin;
  for (; j + DOT_CHAINS <= end; j += DOT_CHAINS)
    all_rows<DOT_CHAINS, T>(a, j, sums + (j - begin), stride);
  for (; j < end; ++j) all_rows<1, T>(a, j, sums + (j - begin), stride);
  const T* bias = a.bias ? static_cast<const T*>(a.bias) + begin : nullptr;
  for (int64_t m = 0; m < a.m; ++m) {
    T* y = static_cast<T*>(a.out) + m * a.out_row + begin;
    for_vectors(0, stride, [&](int64_t i, int lanes) {
      const vf v = load_lanes(sums + m * stride + i, lanes) + load_or_zero(bias, i, lanes);
      store_lanes(y + i, activated(a.activation, v), lanes);
    });
  }
}

static void linear_few_rows(const FewRowsArgs& args) {
  if (!args.m) return;
  with_dtype(args.dtype, [&](auto element) {
    parallel_for(
        args.n, DOT_CHAINS * (1 + Tuning::GRAIN / DOT_CHAINS / (args.k + 1)),
        [&](int64_t begin, int64_t end) { few_rows_range<decltype(element)>(args, begin, end); });
  });
}

}  // namespace fm::FM_TARGET
