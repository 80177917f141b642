// Reductions over flat tensors whose result has the same bits for any thread count: fixed chunks, summed in order
// (parallel.h). Reference: reduce_reference.cc. Tested by tests/kernels/test_reduce.py.
#pragma once
#include "simd/simd.h"

namespace fm::FM_TARGET {

// Short runs are summed in float with four accumulators, the runs in double: relative error near 1e-7 for any n.
template <class T>
FM_INLINE double sum_of_squares(const T* x, int64_t begin, int64_t end) {
  constexpr int64_t RUN = 4096;
  double total = 0;
  for (int64_t first = begin; first < end; first += RUN) {
    const int64_t last = first + RUN < end ? first + RUN : end;
    vf sum[4] = {};
    int64_t i = first;
    for (; i + 4 * VL <= last; i += 4 * VL) {
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        const vf v = load(x + i + k * VL);
        sum[k] = v * v + sum[k];
      }
    }
    for_vectors(i, last, [&](int64_t j, int lanes) {
      const vf v = load_lanes(x + j, lanes);
      sum[0] = v * v + sum[0];
    });
    total += hsum((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
  return total;
}

static double squared_norm(const void* x, DType dtype, int64_t n) {
  double total = 0;
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const T* p = static_cast<const T*>(x);
    total =
        parallel_sum(n, [&](int64_t begin, int64_t end) { return sum_of_squares(p, begin, end); });
  });
  return total;
}

static int64_t count_zeros(const void* x, DType dtype, int64_t n) {
  double nonzero = 0;
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const T* p = static_cast<const T*>(x);
    nonzero = parallel_sum(n, [&](int64_t begin, int64_t end) {
      vi count = {};
      for_vectors(begin, end,
                  [&](int64_t i, int lanes) { count -= load_lanes(p + i, lanes) != 0.0f; });
      return static_cast<double>(
          hsum(__builtin_convertvector(count, vf)));  // at most SUM_CHUNK: exact in float
    });
  });
  return n - static_cast<int64_t>(nonzero);
}

// Each sum is formed in float from the first row to the last: the bits do not depend on vectors or threads.
static void sum_rows(const void* x, DType dtype, int64_t rows, int64_t cols, int64_t stride,
                     void* out, DType out_dtype) {
  with_dtype(dtype, [&](auto element) {
    with_dtype(out_dtype, [&](auto out_element) {
      const auto* source = static_cast<const decltype(element)*>(x);
      auto* target = static_cast<decltype(out_element)*>(out);
      parallel_for(cols, Tuning::GRAIN, [&](int64_t begin, int64_t end) {
        for_vectors(begin, end, [&](int64_t i, int lanes) {
          vf sum = load_lanes(source + i, lanes);
          for (int64_t row = 1; row < rows; ++row)
            sum += load_lanes(source + row * stride + i, lanes);
          store_lanes(target + i, sum, lanes);
        });
      });
    });
  });
}

}  // namespace fm::FM_TARGET
