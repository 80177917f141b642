// Walks over (rows, cols) matrices that the kernels on rows share: blocks of rows, and sums over
// rows whose bits do not depend on the number of threads. Tested by tests/kernels/test_rowwise.py.
#pragma once
#include "simd/simd.h"

namespace fm::FM_TARGET {

constexpr int ROW_BLOCK = Tuning::ROW_BLOCK;
constexpr int64_t ROW_CHUNKS = Tuning::ROW_CHUNKS, COLUMN_BLOCK = Tuning::COLUMN_BLOCK;

// body(Count<R>, first row) for the blocks of [begin, end); begin must be a multiple of ROW_BLOCK, so that a row is in
// the same kind of block whatever the ranges are.
template <class F>
FM_INLINE void for_row_blocks(int64_t begin, int64_t end, const F& body) {
  int64_t row = begin;
  for (; row + ROW_BLOCK <= end; row += ROW_BLOCK) body(Count<ROW_BLOCK>(), row);
  for (; row < end; ++row) body(Count<1>(), row);
}

// Rows per range of parallel_for, a multiple of ROW_BLOCK: at least GRAIN elements.
FM_INLINE int64_t row_grain(int64_t cols) {
  return ROW_BLOCK * (1 + Tuning::GRAIN / ROW_BLOCK / (cols + 1));
}

// What a walk along memory reaches BYTES after p; 0: nothing.
template <int64_t BYTES, class T>
FM_INLINE void prefetch_ahead(const T* p) {
  if constexpr (BYTES) prefetch(reinterpret_cast<const char*>(p) + BYTES);
}

FM_INLINE void clear(float* p, int64_t n) {
  for_vectors(0, n, [&](int64_t i, int lanes) { store_lanes(p + i, vf{}, lanes); });
}

// sum[i] += partial[0][i] + partial[1][i] + ..., in this order, for the columns [begin, end).
FM_INLINE void add_partials(float* sum, const float* partial, int64_t chunks, int64_t stride,
                            int64_t begin, int64_t end) {
  constexpr int VECTORS = COLUMN_BLOCK / VL;
  int64_t i = begin;
  for (; i + COLUMN_BLOCK <= end; i += COLUMN_BLOCK) {
    vf total[VECTORS] = {};
    for (int64_t c = 0; c < chunks; ++c) {
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; ++v) total[v] += load(partial + c * stride + i + v * VL);
    }
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) store(sum + i + v * VL, load(sum + i + v * VL) + total[v]);
  }
  for_vectors(i, end, [&](int64_t j, int lanes) {
    vf total = {};
    for (int64_t c = 0; c < chunks; ++c) total += load_lanes(partial + c * stride + j, lanes);
    store_lanes(sum + j, load_lanes(sum + j, lanes) + total, lanes);
  });
}

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

// variance[r] = 1 / sqrt(variance[r] + eps), all rows in one reciprocal square root.
template <int R>
FM_INLINE void to_rstds(float (&variance)[R], float eps) {
  vf all = {};
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) all[r] = variance[r] + eps;
  const vf root = rsqrt(all);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) variance[r] = root[r];
}

// Runs body(first row, end row, partial, stride) over fixed chunks of rows, in which body adds its K column sums to
// partial[k * stride + column], and then adds the chunks, in order, to sums[k]. A null sums[k] is not wanted.
template <int K, class F>
FM_INLINE void with_column_sums(int64_t rows, int64_t cols, float* const* sums, const F& body) {
  const int64_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
  const int64_t chunks = blocks < ROW_CHUNKS ? blocks : ROW_CHUNKS;
  const int64_t stride = (cols + COLUMN_BLOCK - 1) / COLUMN_BLOCK * COLUMN_BLOCK;
  float* partial = static_cast<float*>(scratch(0, chunks * K * stride * sizeof(float)));
  parallel_for(chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const int64_t first = blocks * c / chunks * ROW_BLOCK,
                    last = blocks * (c + 1) / chunks * ROW_BLOCK;
      clear(partial + c * K * stride, K * stride);
      body(first, last < rows ? last : rows, partial + c * K * stride, stride);
    }
  });
  parallel_for(cols, COLUMN_BLOCK, [&](int64_t begin, int64_t end) {
    for (int k = 0; k < K; ++k)
      if (sums[k]) add_partials(sums[k], partial + k * stride, chunks, K * stride, begin, end);
  });
}

// v in the first lanes, other in the rest: for what the zeros beyond the end of a row turn into.
FM_INLINE vf first_of(vf v, int lanes, vf other = vf{}) {
  return lanes == VL ? v : select(lane_index() < static_cast<uint32_t>(lanes), v, other);
}

// p[i] += v
FM_INLINE void add_to(float* p, vf v, int lanes) {
  store_lanes(p, load_lanes(p, lanes) + v, lanes);
}

// v[0] + ... + v[R - 1] in a fixed tree.
template <int R>
FM_INLINE vf sum_of(const vf (&v)[R]) {
  if constexpr (R == 4) return (v[0] + v[1]) + (v[2] + v[3]);
  return v[0];
}

}  // namespace fm::FM_TARGET
