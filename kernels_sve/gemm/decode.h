// What a step of generation does with a few new tokens, where reading the weights takes the time.
//
//   linear_few_rows(args)     y = f(x W^T + bias) for a few rows of x, W read once and as it lies
//
// A GEMM packs W first, and its tiles have more rows than there are. Here every product is a dot product along a row of W, of a few rows
// at a time, summed in float32 lanes, so its bits depend neither on threads nor on the number of rows. Reference:
// decode_reference.cc. Tested by tests/kernels/test_decode.py, timed by python -m benchmarks decode.
#pragma once
#include <type_traits>

#include "gemm/q8_elements.h"
#include "rowwise/activation.h"

namespace fm::FM_TARGET {

// Most rows of x at once; rows of W that a thread takes at least, whole blocks of any height.
constexpr int DOT_TOKENS = 8, DOT_UNIT = 12;

// Rows of W at once, whose products with M rows of x are sums in registers.
template <int M>
constexpr int DOT_ROWS = Tuning::DOT_SUMS / M > 4 ? 4 : Tuning::DOT_SUMS / M;

// How elements T of W and those of x, X, are multiplied: COUNT or, at the end of a row, fewer of them in a vector.
// As float lanes; x is widened once for all rows of W.
template <class T>
struct DotLanes {
  using X = float;
  static constexpr int COUNT = VL;
  FM_INLINE vf load_x(const float* p, int count) { return load_lanes(p, count); }
  FM_INLINE vf load_w(const T* p, int count) { return load_lanes(p, count); }
  FM_INLINE vf multiply_add(vf w, vf x, vf sum) { return w * x + sum; }
};
#ifdef FM_HAS_BF16_PAIRS
// As pairs in one instruction.
template <>
struct DotLanes<bf16> {
  using X = bf16;
  static constexpr int COUNT = 2 * VL;
  FM_INLINE vu load_x(const bf16* p, int count) {
    return count == COUNT ? load_pairs(&p->bits) : load_pairs_n(&p->bits, count);
  }
  FM_INLINE vu load_w(const bf16* p, int count) { return load_x(p, count); }
  FM_INLINE vf multiply_add(vu w, vu x, vf sum) { return dot_pairs(sum, w, x); }
};
#endif

// The rows of W that follow a block of R rows, or the block after them where one is shorter than DOT_AHEAD bytes. They are
// fetched in the order of memory, because rows side by side confuse a hardware's prefetching.
template <int R>
FM_INLINE const char* rows_after(const void* block, int64_t row_bytes, int64_t block_bytes) {
  return static_cast<const char*>(block) +
         R * row_bytes * (block_bytes < Tuning::DOT_AHEAD ? 2 : 1);
}
template <bool FETCHES, int BYTES>
FM_INLINE void fetch(const char*& next) {
  if constexpr (FETCHES) {
#pragma GCC unroll 4
    for (int at = 0; at < BYTES; at += Tuning::LINE) prefetch_l2(next + at);
    next += BYTES;
  }
}

// Runs body(whether rows of k elements of the size are fetched), as a constant.
template <class F>
FM_INLINE void with_fetching(int64_t k, int64_t size, const F& body) {
  if (Tuning::DOT_AHEAD > 0 && k * size * size <= Tuning::DOT_FETCHED)
    body(std::bool_constant<(Tuning::DOT_AHEAD > 0)>());
  else
    body(std::false_type());
}

// W as it is stored. each<R>(begin, k, body) runs body(i, count, w) over the columns, w(r) being those of row begin + r.
template <class T, bool FETCHES>
struct PlainRows {
  using Words = DotLanes<T>;
  const T* first;
  int64_t row;

  template <int R, class F>
  inline __attribute__((always_inline)) void each(int64_t begin, int64_t k, const F& body) const {
    constexpr int COUNT = Words::COUNT, BYTES = sizeof(T) * COUNT;
    const T* rows = first + begin * row;
    const char* next = rows_after<R>(rows, row * sizeof(T), R * k * sizeof(T));
    const auto w = [&](int64_t i, int count) FM_INLINE_LAMBDA {
      return [=](int r) FM_INLINE_LAMBDA { return Words::load_w(rows + r * row + i, count); };
    };
    int64_t i = 0;
    for (; i + COUNT <= k; i += COUNT) {
      fetch<FETCHES, R * BYTES>(next);
      body(i, COUNT, w(i, COUNT));
    }
    if (i < k) body(i, static_cast<int>(k - i), w(i, static_cast<int>(k - i)));
  }
};

// Of int8 with scales. The sums are those of the same numbers as float, in the same order.
template <bool FETCHES>
struct Q8Rows {
  using Words = DotLanes<float>;
  const int8_t* first;
  int64_t row;
  Q8Scales scales;

  template <int R, class F>
  inline __attribute__((always_inline)) void each(int64_t begin, int64_t k, const F& body) const {
    const int8_t* rows = first + begin * row;
    const char* next = rows_after<R>(rows, row, R * k);
    const auto w = [&](int64_t i, int count, const vf* scale) FM_INLINE_LAMBDA {
      return [=](int r)
                 FM_INLINE_LAMBDA { return q8_values(rows + r * row + i, count) * scale[r]; };
    };
    for (int64_t block = 0; block < k; block += Q8_BLOCK) {
      vf scale[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r)
        scale[r] = q8_scale(scales.at + (begin + r) * scales.row + block / Q8_BLOCK);
      fetch<FETCHES, R * Q8_BLOCK>(next);
      if (block + Q8_BLOCK <= k) {
#pragma GCC unroll 4
        for (int64_t i = block; i < block + Q8_BLOCK; i += VL) body(i, VL, w(i, VL, scale));
      } else {
        for_vectors(block, k, [&](int64_t i, int lanes) { body(i, lanes, w(i, lanes, scale)); });
      }
    }
  }
};

// Rows of x, `row` elements apart.
template <class X>
struct XRows {
  const X* first;
  int64_t row, count, k;
};

// Columns [begin, begin + R) of M rows of y from row m on, before the bias. A product has one sum of lanes, whatever R and M are.
template <int R, int M, class Rows, class X>
FM_INLINE void few_columns(const Rows& w, int64_t begin, const XRows<X>& x, int64_t m, float* sums,
                           int64_t stride) {
  using Words = typename Rows::Words;
  const X* first = x.first + m * x.row;
  vf sum[R][M] = {};
  w.template each<R>(begin, x.k, [&](int64_t i, int count, const auto& weights) FM_INLINE_LAMBDA {
    decltype(weights(0)) row[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) row[r] = weights(r);
#pragma GCC unroll 8
    for (int j = 0; j < M; ++j) {
      const auto column = Words::load_x(first + j * x.row + i, count);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r][j] = Words::multiply_add(row[r], column, sum[r][j]);
    }
  });
#pragma GCC unroll 8
  for (int j = 0; j < M; ++j) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sums[(m + j) * stride + r] = hsum(sum[r][j]);
  }
}

// The same of M rows of y at a time from m on, while there are as many.
template <int R, int M, class Rows, class X>
FM_INLINE void rows_by(const Rows& w, int64_t begin, const XRows<X>& x, int64_t& m, float* sums,
                       int64_t stride) {
  if constexpr (R <= DOT_ROWS<M>) {
    for (; m + M <= x.count; m += M) few_columns<R, M>(w, begin, x, m, sums, stride);
  }
}

// Columns [begin, end) of all rows, R at a time, while there are as many; returns the first that is left. Arguments are copies:
// behind references their fields are read again for every row, after stores that wait for the row's sums.
template <int R, class Rows, class X>
FM_ONCE int64_t columns_by(const Rows w, int64_t begin, int64_t end, const XRows<X> x, float* sums,
                           int64_t stride) {
  for (; begin + R <= end; begin += R, sums += R) {
    int64_t m = 0;
    rows_by<R, DOT_TOKENS>(w, begin, x, m, sums, stride);
    rows_by<R, 4>(w, begin, x, m, sums, stride);
    rows_by<R, 2>(w, begin, x, m, sums, stride);
    rows_by<R, 1>(w, begin, x, m, sums, stride);
  }
  return begin;
}

template <class Rows, class X>
FM_INLINE int64_t whole_blocks(const Rows& w, int64_t begin, int64_t end, const XRows<X>& x,
                               float* sums, int64_t stride) {
  if (x.count >= DOT_TOKENS)
    return columns_by<DOT_ROWS<DOT_TOKENS>>(w, begin, end, x, sums, stride);
  if (x.count >= 4) return columns_by<DOT_ROWS<4>>(w, begin, end, x, sums, stride);
  return columns_by<DOT_ROWS<2>>(w, begin, end, x, sums, stride);
}

// Columns [begin, end) of y, of T.
template <class T, class Rows, class X>
FM_INLINE void few_rows_range(const FewRowsArgs a, const Rows& w, const XRows<X>& x, int64_t begin,
                              int64_t end) {
  const int64_t stride = end - begin;
  float* sums = static_cast<float*>(scratch(0, a.m * stride * sizeof(float)));
  const int64_t rest = whole_blocks(w, begin, end, x, sums, stride);
  columns_by<1>(w, rest, end, x, sums + (rest - begin), stride);
  const T* bias = a.bias ? static_cast<const T*>(a.bias) + begin : nullptr;
  for (int64_t m = 0; m < a.m; ++m) {
    T* y = static_cast<T*>(a.out) + m * a.out_row + begin;
    for_vectors(0, stride, [&](int64_t i, int lanes) {
      const vf v = load_lanes(sums + m * stride + i, lanes) + load_or_zero(bias, i, lanes);
      store_lanes(y + i, activated(a.activation, v), lanes);
    });
  }
}

// x, of T, as X: in this thread's memory if it is widened.
template <class X, class T>
FM_INLINE XRows<X> x_rows(const FewRowsArgs& a) {
  const T* x = static_cast<const T*>(a.x);
  if constexpr (sizeof(T) == sizeof(X)) {
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

template <class T, bool FETCHES>
FM_INLINE void columns_of_weight(const FewRowsArgs& args, int64_t begin, int64_t end) {
  const auto run = [&](const auto& w) {
    using X = typename std::decay_t<decltype(w)>::Words::X;
    few_rows_range<T>(args, w, x_rows<X, T>(args), begin, end);
  };
  if (args.scales) {
    const auto* values = static_cast<const int8_t*>(args.weight);
    run(Q8Rows<FETCHES>{values, args.weight_row, args.scales});
  } else {
    const auto* weight = static_cast<const T*>(args.weight);
    run(PlainRows<T, FETCHES>{weight, args.weight_row});
  }
}

static void linear_few_rows(const FewRowsArgs& args) {
  if (!args.m) return;
  with_dtype(args.dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t unit = DOT_UNIT * (1 + Tuning::GRAIN / DOT_UNIT / (args.k + 1));
    parallel_for(args.n, unit, [&](int64_t begin, int64_t end) {
      with_fetching(args.k, args.scales ? 1 : sizeof(T), [&](auto fetches) {
        columns_of_weight<T, decltype(fetches)::value>(args, begin, end);
      });
    });
  });
}

}  // namespace fm::FM_TARGET
