// What a step of generation does with a few new tokens, where reading the weights takes the time.
//
//   linear_few_rows(args)     y = f(x W^T + bias) for a few rows of x, W read once and as it lies
//
// A GEMM packs W first, and its tiles have more rows than there are. Here every product is a dot product along a row of W, one row after
// another as memory has them, summed in float32 lanes, so its bits depend neither on threads nor on the number of rows. Reference:
// reference_decode.cc. Tested by tests/kernels/test_decode.py, timed by python -m benchmarks decode.
#pragma once
#include "gemm/q8_elements.h"
#include "rowwise/activation.h"

namespace fm::FM_TARGET {

constexpr int DOT_CHAINS = Tuning::DOT_CHAINS,
              DOT_TOKENS = 4;  // sums of a product side by side; rows of x at once

// Rows of W as they are read: of T, or of int8 with scales.
template <class T>
struct PlainRow {
  const T* at;
};
struct Q8Row {
  const int8_t* values;
  const bf16* scales;
};

template <class T>
struct PlainRows {
  const T* first;
  int64_t row;
  PlainRow<T> operator[](int64_t j) const { return {first + j * row}; }
};
struct Q8Rows {
  const int8_t* first;
  int64_t row;
  Q8Scales scales;
  Q8Row operator[](int64_t j) const { return {first + j * row, scales.at + j * scales.row}; }
};

// sum[m] += w x of N vectors of k from i on, one vector to a chain.
template <int M, int N, class X, class W>
FM_INLINE void add_products(vf (&sum)[M][DOT_CHAINS], const X* x, int64_t x_row, int64_t i,
                            int lanes, const W& w) {
#pragma GCC unroll 4
  for (int c = 0; c < N; ++c) {
    const vf row = w(i + c * VL);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
      sum[m][c] = row * load_lanes(x + m * x_row + i + c * VL, lanes) + sum[m][c];
  }
}

template <int M, class T>
FM_INLINE void sum_products(const PlainRow<T>& w, const T* x, int64_t x_row, int64_t k,
                            vf (&sum)[M][DOT_CHAINS]) {
  for_vector_groups<DOT_CHAINS>(0, k, [&](auto count, int64_t i, int lanes) FM_INLINE_LAMBDA {
    add_products<M, decltype(count)::value>(sum, x, x_row, i, lanes,
                                            [&](int64_t at) FM_INLINE_LAMBDA {
                                              prefetch_ahead<Tuning::DOT_AHEAD>(w.at + at);
                                              return load_lanes(w.at + at, lanes);
                                            });
  });
}

// The same sums in the same order. Whole blocks have one scale each.
template <int M>
FM_INLINE void sum_products(const Q8Row& w, const float* x, int64_t x_row, int64_t k,
                            vf (&sum)[M][DOT_CHAINS]) {
  static_assert(Q8_BLOCK % (DOT_CHAINS * VL) == 0, "a block is whole groups of chains");
  vf scale;
  const auto add = [&](auto count, int64_t i, int lanes) FM_INLINE_LAMBDA {
    add_products<M, decltype(count)::value>(
        sum, x, x_row, i, lanes,
        [&](int64_t at) FM_INLINE_LAMBDA { return q8_values(w.values + at, lanes) * scale; });
  };
  const int64_t whole = k - k % Q8_BLOCK;
  for (int64_t i = 0; i < whole; i += Q8_BLOCK) {
    scale = q8_scale(w.scales + i / Q8_BLOCK);
    prefetch_ahead<Tuning::DOT_AHEAD>(w.values + i);
#pragma GCC unroll 8
    for (int64_t group = 0; group < Q8_BLOCK; group += DOT_CHAINS * VL)
      add(Count<DOT_CHAINS>(), i + group, VL);
  }
  if (whole == k) return;
  scale = q8_scale(w.scales + whole / Q8_BLOCK);
  for_vector_groups<DOT_CHAINS>(whole, k, add);
}

// total[m] = lanes of w . x row m, for M rows of x, k columns each.
template <int M, class Row, class X>
FM_INLINE void dot_products(const Row& w, const X* x, int64_t x_row, int64_t k, vf* total) {
  vf sum[M][DOT_CHAINS] = {};
  sum_products<M>(w, x, x_row, k, sum);
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    total[m] = sum[m][0];
#pragma GCC unroll 4
    for (int c = 1; c < DOT_CHAINS; ++c) total[m] += sum[m][c];
  }
}

// M rows of x, `row` elements apart.
template <class X>
struct XRows {
  const X* first;
  int64_t row, count, k;
  XRows from(int64_t m) const { return {first + m * row, row, count - m, k}; }
};

// Columns [begin, begin + R) of M rows of y, before the bias; R horizontal sums overlap.
template <int R, int M, class Rows, class X>
FM_INLINE void few_columns(const Rows& w, int64_t begin, const XRows<X>& x, float* sums,
                           int64_t stride) {
  vf total[R][M];
  for (int r = 0; r < R; ++r) dot_products<M>(w[begin + r], x.first, x.row, x.k, total[r]);
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[m * stride + r] = hsum(total[r][m]);
  }
}

// The same of all rows of y. The rows of W stay in L1 from one M rows of x to the next.
template <int R, class Rows, class X>
FM_INLINE void all_rows(const Rows& w, int64_t begin, const XRows<X>& x, float* sums,
                        int64_t stride) {
  int64_t m = 0;
  for (; m + DOT_TOKENS <= x.count; m += DOT_TOKENS)
    few_columns<R, DOT_TOKENS>(w, begin, x.from(m), sums + m * stride, stride);
  for (; m + 2 <= x.count; m += 2)
    few_columns<R, 2>(w, begin, x.from(m), sums + m * stride, stride);
  if (m < x.count) few_columns<R, 1>(w, begin, x.from(m), sums + m * stride, stride);
}

// Columns [begin, end) of y, of T. Arguments are copies: behind references their fields are read again for every row, after stores
// that wait for the row's sums.
template <class T, class Rows, class X>
FM_INLINE void few_rows_range(const FewRowsArgs a, const Rows w, const XRows<X> x, int64_t begin,
                              int64_t end) {
  const int64_t stride = end - begin;
  float* sums = static_cast<float*>(scratch(0, a.m * stride * sizeof(float)));
  int64_t j = begin;
  for (; j + DOT_CHAINS <= end; j += DOT_CHAINS)
    all_rows<DOT_CHAINS>(w, j, x, sums + (j - begin), stride);
  for (; j < end; ++j) all_rows<1>(w, j, x, sums + (j - begin), stride);
  const T* bias = a.bias ? static_cast<const T*>(a.bias) + begin : nullptr;
  for (int64_t m = 0; m < a.m; ++m) {
    T* y = static_cast<T*>(a.out) + m * a.out_row + begin;
    for_vectors(0, stride, [&](int64_t i, int lanes) {
      const vf v = load_lanes(sums + m * stride + i, lanes) + load_or_zero(bias, i, lanes);
      store_lanes(y + i, activated(a.activation, v), lanes);
    });
  }
}

// x as float, in this thread's memory if it is of another type.
template <class T>
FM_INLINE XRows<float> x_as_float(const FewRowsArgs& a) {
  const T* x = static_cast<const T*>(a.x);
  if constexpr (sizeof(T) == sizeof(float)) {
    return {x, a.x_row, a.m, a.k};
  } else {
    float* copy = static_cast<float*>(scratch(1, a.m * a.k * sizeof(float)));
    for (int64_t m = 0; m < a.m; ++m) {
      for_vectors(0, a.k, [&](int64_t i, int lanes) {
        store_lanes(copy + m * a.k + i, load_lanes(x + m * a.x_row + i, lanes), lanes);
      });
    }
    return {copy, a.k, a.m, a.k};
  }
}

static void linear_few_rows(const FewRowsArgs& args) {
  if (!args.m) return;
  with_dtype(args.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(args.n, DOT_CHAINS * (1 + Tuning::GRAIN / DOT_CHAINS / (args.k + 1)),
                 [&](int64_t begin, int64_t end) {
                   if (args.scales) {
                     const Q8Rows w = {static_cast<const int8_t*>(args.weight), args.weight_row,
                                       args.scales};
                     return few_rows_range<T>(args, w, x_as_float<T>(args), begin, end);
                   }
                   const PlainRows<T> w = {static_cast<const T*>(args.weight), args.weight_row};
                   const XRows<T> x = {static_cast<const T*>(args.x), args.x_row, args.m, args.k};
                   few_rows_range<T>(args, w, x, begin, end);
                 });
  });
}

}  // namespace fm::FM_TARGET
