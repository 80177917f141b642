// The micro-kernel where an instruction multiplies 2 x 4 by 4 x 2 bfloat16 matrices, or 2 x 8 by 8 x 2 int8 matrices, in every 128
// bits of a vector (Arm's BFMMLA and SMMLA): four or eight times the multiply-adds of a float32 one. Included by gemm_micro.h, inside its namespace.
//
// In a panel the pairs (k, k+1) and (k+2, k+3) of a row of A or a column of B lie side by side, so 128 bits hold two rows
// or two columns of four k. A vector of B has VL/2 columns, two rows of A are loaded into every 128 bits, and a vector of
// sums holds 2 x 2 blocks side by side: lanes (r, c) (r, c+1) (r+1, c) (r+1, c+1). Two neighbouring vectors of sums are
// VL columns of both rows: the even doublewords those of row r, the odd ones those of row r+1. Sums: as many registers as
// micro_kernel's.
#pragma once

// Words of consecutive k side by side: rows w and w+1 of a panel become (x0, y0, x1, y1, ...).
template <int WIDTH>
FM_INLINE void words_beside(float* panel, int64_t words) {
  typedef uint32_t Four __attribute__((vector_size(16), aligned(4), may_alias));
  static_assert(WIDTH % 4 == 0, "panels are whole vectors of 128 bits");
  for (int64_t w = 0; w < words; w += 2, panel += 2 * WIDTH) {
    Four* rows = reinterpret_cast<Four*>(panel);
    Four row[WIDTH / 2];
#pragma GCC unroll 32
    for (int i = 0; i < WIDTH / 2; ++i) row[i] = rows[i];
#pragma GCC unroll 32
    for (int i = 0; i < WIDTH / 4; ++i) {
      rows[2 * i] = __builtin_shufflevector(row[i], row[i + WIDTH / 4], 0, 4, 1, 5);
      rows[2 * i + 1] = __builtin_shufflevector(row[i], row[i + WIDTH / 4], 2, 6, 3, 7);
    }
  }
}

// micro_kernel for a panel of such words.
template <class Words, int ROWS>
static __attribute__((noinline)) void quads_kernel(int64_t words, const uint32_t* a, const float* b,
                                                   float* c, int64_t ldc, bool add,
                                                   Fetches& fetches) {
  vf sum[ROWS / 2][2 * NR_VECTORS] = {};
  fetches.begin(ROWS, words);
  const uint32_t* const all_a = a;
  const float* const all_b = b;
#pragma GCC unroll 1
  for (int run = 0; run < Words::PARTS; ++run) {
    const int64_t first = run * (words / Words::PARTS), count = words - first;
    a = all_a + first * MR, b = all_b;
    for (int64_t k = 0; k < count;) {
      fetches.turn();
      for (const int64_t end = min(count, k + Fetches::STEPS); k < end; k += 2) {
        vu column[2 * NR_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < 2 * NR_VECTORS; ++v) column[v] = (vu)load_aligned(b + v * VL);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS / 2; ++r) {
          const vu rows = broadcast_quads(a + 4 * r);
#pragma GCC unroll 8
          for (int v = 0; v < 2 * NR_VECTORS; ++v)
            sum[r][v] = Words::multiply_quads(sum[r][v], rows, column[v]);
        }
        a += 2 * MR;
        b += 2 * NR;
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < NR_VECTORS; ++v) {
      float* p = c + r * ldc + v * VL;
      const vf left = sum[r / 2][2 * v], right = sum[r / 2][2 * v + 1];
      const vf whole = r % 2 ? odd_doublewords(left, right) : even_doublewords(left, right);
      store(p, add ? Words::add(load(p), whole) : whole);
    }
  }
}
