// Matmuls of a chunk of the delta rule on float matrices in this thread's memory, and what else is done to whole matrices. An
// operand of A is stored with the summed dimension first, as micro_kernel of gemm_micro.h reads it: row r of C takes column r of A.
// Columns are padded with zeros to whole tiles; rows begin at different lines of L1. Tested by tests/kernels/test_delta_net.py.
#pragma once
#include "rowwise/rowwise_blocks.h"
#include "simd/transpose.h"

namespace fm::FM_TARGET {

constexpr int DELTA_ROWS = Tuning::GEMM_MR, DELTA_VECTORS = Tuning::GEMM_NR_VECTORS;
constexpr int DELTA_LANES = DELTA_VECTORS * VL;

FM_INLINE int64_t whole_tiles(int64_t n) {
  return (n + DELTA_LANES - 1) / DELTA_LANES * DELTA_LANES;
}

// Rows of `cols` floats, a multiple of DELTA_LANES, `stride` apart.
struct Matrix {
  float* data;
  int64_t cols, stride;
  float* row(int64_t r) const { return data + r * stride; }
  Matrix from(int64_t row, int64_t col) const {
    return {data + row * stride + col, cols - col, stride};
  }
};

FM_INLINE int64_t row_stride(int64_t cols) { return cols + 16; }

// Gives memory to matrices, or counts it where there is none.
struct Memory {
  float* data = nullptr;
  int64_t used = 0;
  float* floats(int64_t n) {
    float* begin = data ? data + used : nullptr;
    used += (n + 63) / 64 * 64;
    return begin;
  }
  Matrix matrix(int64_t rows, int64_t cols) {
    const int64_t stride = row_stride(whole_tiles(cols));
    return {floats(rows * stride), whole_tiles(cols), stride};
  }
};

// R rows and DELTA_LANES columns of C = A B, or of C += A B with ADD.
template <int R, bool ADD>
static __attribute__((noinline)) void delta_tile(float* c, int64_t ldc, const float* a, int64_t lda,
                                                 const float* b, int64_t ldb, int64_t steps) {
  vf sum[R][DELTA_VECTORS];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < DELTA_VECTORS; ++v) sum[r][v] = ADD ? load(c + r * ldc + v * VL) : vf{};
  }
#pragma GCC unroll 1
  for (int64_t k = 0; k < steps; ++k) {
    vf column[DELTA_VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < DELTA_VECTORS; ++v) column[v] = load(b + v * VL);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < DELTA_VECTORS; ++v) sum[r][v] = broadcast(a[r]) * column[v] + sum[r][v];
    }
    a += lda;
    b += ldb;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < DELTA_VECTORS; ++v) store(c + r * ldc + v * VL, sum[r][v]);
  }
}

using DeltaTile = void (*)(float*, int64_t, const float*, int64_t, const float*, int64_t, int64_t);

template <bool ADD, int R = DELTA_ROWS>
FM_INLINE DeltaTile delta_tile_for(int64_t rows) {
  if constexpr (R > 2) {
    if (rows <= R - 2) return delta_tile_for<ADD, R - 2>(rows);
  }
  return &delta_tile<R, ADD>;
}

// The steps of the sum: all, or where A is a triangle those at or before the last row of a tile, or from its first row on.
enum class Steps { ALL, UNTIL_ROW, FROM_ROW };

// C (rows, c.cols) = A B, or += with ADD; rows are even.
template <bool ADD>
FM_ONCE void multiply(Matrix c, Matrix a, Matrix b, int64_t rows, int64_t steps,
                      Steps kind = Steps::ALL) {
  for (int64_t col = 0; col < c.cols; col += DELTA_LANES) {
    for (int64_t row = 0; row < rows; row += DELTA_ROWS) {
      const int64_t count = min(DELTA_ROWS, rows - row);
      const int64_t first = kind == Steps::FROM_ROW ? row : 0,
                    last = kind == Steps::UNTIL_ROW ? min(steps, row + count) : steps;
      delta_tile_for<ADD>(count)(c.row(row) + col, c.stride, a.row(first) + row, a.stride,
                                 b.row(first) + col, b.stride, last - first);
    }
  }
}

// to = the transposed of rows of `from`, a multiple of VL.
FM_ONCE void transpose_matrix(Matrix to, Matrix from, int64_t rows) {
  for (int64_t c = 0; c < from.cols; c += VL) {
    for (int64_t r = 0; r < rows; r += VL) {
      vf block[VL];
#pragma GCC unroll 16
      for (int i = 0; i < VL; ++i) block[i] = load(from.row(r + i) + c);
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < VL; ++i) store(to.row(c + i) + r, block[i]);
    }
  }
}

// body(r, i) for every vector of rows of m.
template <class F>
FM_INLINE void for_elements(const Matrix& m, int64_t rows, const F& body) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < m.cols; i += VL) body(r, i);
  }
}

// Each row of m times factors[r].
FM_ONCE void scale_rows(Matrix m, int64_t rows, const float* factors) {
  for_elements(m, rows,
               [&](int64_t r, int64_t i) { store(m.row(r) + i, load(m.row(r) + i) * factors[r]); });
}

// out[r] = the product of row r of a and of b; rows are a multiple of ROW_BLOCK.
FM_ONCE void row_products(float* out, Matrix a, Matrix b, int64_t rows) {
  for (int64_t row = 0; row < rows; row += ROW_BLOCK) {
    float sums[ROW_BLOCK];
    sum_over_columns<ROW_BLOCK>(a.cols, sums, [&](int r, int64_t i, int) {
      return load(a.row(row + r) + i) * load(b.row(row + r) + i);
    });
    for (int r = 0; r < ROW_BLOCK; ++r) out[row + r] = sums[r];
  }
}

// Rows [0, count) of x as floats, then rows of zeros up to `rows`; columns from d on are zeros.
template <class T>
FM_INLINE void load_matrix(Matrix to, const T* x, int64_t stride, int64_t count, int64_t d,
                           int64_t rows) {
  for_elements(to, rows, [&](int64_t r, int64_t i) {
    const int64_t lanes = r < count ? min(VL, d - i) : 0;
    store(to.row(r) + i,
          lanes > 0 ? load_lanes(x + r * stride + i, static_cast<int>(lanes)) : vf{});
  });
}

template <class T>
FM_INLINE void store_matrix(Matrix from, T* x, int64_t stride, int64_t count, int64_t d) {
  for (int64_t r = 0; r < count; ++r) {
    for_vectors(0, d, [&](int64_t i, int lanes) {
      store_lanes(x + r * stride + i, load(from.row(r) + i), lanes);
    });
  }
}

}  // namespace fm::FM_TARGET
