// A matmul of few rows with a weight whose rows run along k: C^T = W A^T. The rows of the weight are those of the micro-kernel, which reads
// them by broadcast where they lie, instead of columns that would have to be transposed into panels for few rows of A. A is packed
// once for the whole weight. Each sum has Gemm's terms in Gemm's order, so the bits are the same. Included by gemm_grouped.h.
#pragma once
#include "gemm/gemm.h"

namespace fm::FM_TARGET {

// C (+)= A B for a tile of ROWS x VECTORS accumulators, where A's rows along k lie a_row words apart and B's vectors in panels.
template <class Words, int ROWS, int VECTORS>
static __attribute__((noinline)) void along_kernel(int64_t words, const typename Words::Word* a,
                                                   int64_t a_row, const float* b, int64_t panel,
                                                   float* c, int64_t ldc, bool add,
                                                   Fetches& fetches) {
  constexpr int64_t RUN =
      2 * Fetches::STEPS;  // what is fetched would keep others waiting if it came faster
  vf sum[ROWS][VECTORS] = {};
  fetches.begin(ROWS, words / 2);
  for (int64_t k = 0; k < words;) {
    fetches.turn();
    const int64_t end = min(words, k + RUN);
#pragma GCC unroll UNROLL
    for (; k < end; ++k, ++a, b += NR) {
      vf column[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v)
        column[v] = load_aligned(b + v / NR_VECTORS * panel + v % NR_VECTORS * VL);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v)
          sum[r][v] = Words::multiply_add(a[r * a_row], column[v], sum[r][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      float* p = c + r * ldc + v * VL;
      store(p, add ? load(p) + sum[r][v] : sum[r][v]);
    }
  }
}

template <class Words>
using AlongKernel = void (*)(int64_t, const typename Words::Word*, int64_t, const float*, int64_t,
                             float*, int64_t, bool, Fetches&);

template <class Words, int VECTORS, int ROWS>
FM_INLINE AlongKernel<Words> along_kernel_for(int64_t rows) {
  if constexpr (ROWS > Words::ROW_STEP) {
    if (rows <= ROWS - Words::ROW_STEP)
      return along_kernel_for<Words, VECTORS, ROWS - Words::ROW_STEP>(rows);
  }
  return &along_kernel<Words, ROWS, VECTORS>;
}

template <class Words, class T>
struct FewRows {
  using Word = typename Words::Word;
  static constexpr bool EXISTS = Words::PARTS * Words::WIDE * Words::BESIDE == 1 && !Words::TILES &&
                                 !Words::INT8 && sizeof(T) * Words::STEP == sizeof(Word);
  static constexpr int ROWS = MR, ROWS_OF_THREE = MR * NR_VECTORS / 3 / ROW_UNIT *
                                                  ROW_UNIT;  // of a tile; with three vectors in it
  const GemmArgs& g;
  Span cols;
  int64_t depth, width;  // of a block of k; of A's panels
  int64_t
      tile_rows;  // ROWS_OF_THREE where the vectors of A are an odd number, so that none is alone
  float *panels, *sums;
  Source source;  // the next rows of the weight

  FewRows(const GemmArgs& args, Span columns)
      : g(args),
        cols(columns),
        depth(block_depth<Words>(g.k, 0, false)),
        width(ceil_div(g.m, NR) * NR),
        tile_rows(g.m > VL && ceil_div(g.m, VL) % 2 ? ROWS_OF_THREE : ROWS) {
    panels = buffer(0, width * words_of<Words>(depth) + VL), sums = buffer(2, cols.size() * width);
  }

  static float* buffer(int slot, int64_t words) {
    return static_cast<float*>(scratch(slot, words * sizeof(float) + 256));
  }

  // Whether it can compute this, and faster than Gemm.
  static bool takes(const GemmArgs& g) {
    const bool whole_words = !(g.k % Words::STEP || g.b_col % Words::STEP ||
                               reinterpret_cast<uintptr_t>(g.b) % sizeof(Word));
    return EXISTS && !g.b_scales && g.b_row == 1 && whole_words && !g.fp16_chunk && g.k && g.m &&
           g.m <= Tuning::MOST_FEW_ROWS && !(g.n % ROW_UNIT) && !has_epilogue(g) &&
           rows_share_l1(ROWS, g.b_col * int64_t(sizeof(T)));
  }

  void run() {
    for (int64_t p = 0; p < g.k; p += depth) {
      const int64_t deep = min(g.k - p, depth);
      pack<Words, NR>(static_cast<const T*>(g.a) + p, g.a_row, 1, 0, g.m, g.m, deep, panels);
      int64_t stored = cols.begin;
      for (int64_t j = cols.begin; j < cols.end;) {
        run_tile(j, min(tile_rows, cols.end - j), p, deep);
        j = min(j + tile_rows, cols.end);
        if (p + deep < g.k || (j < cols.end && j - stored < Tuning::FEW_TOGETHER * tile_rows))
          continue;
        with_dtype(g.out_dtype,
                   [&](auto element) { store_turned<decltype(element)>({stored, j}); });
        stored = j;
      }
    }
  }

  const T* weight_at(int64_t j, int64_t p) const {
    return static_cast<const T*>(g.b) + j * g.b_col + p;
  }

  // Rows j of the weight, from k = p on.
  void run_tile(int64_t j, int64_t rows, int64_t p, int64_t deep) {
    const int64_t words = words_of<Words>(deep), next = j + rows;
    float* tile = sums + (j - cols.begin) * width;
    source = next < cols.end ? Source::of_rows(weight_at(next, p), deep * sizeof(T),
                                               g.b_col * sizeof(T), tile_rows)
                             : Source();
    for (int64_t i = 0; i < g.m;) {
      const int64_t left = ceil_div(g.m - i, VL), vectors = left == 1 || left == 3 ? left : 2;
      const auto kernel = vectors == 2   ? along_kernel_for<Words, 2, ROWS>(rows)
                          : vectors == 1 ? along_kernel_for<Words, 1, ROWS>(rows)
                                         : along_kernel_for<Words, 3, ROWS_OF_THREE>(rows);
      Fetches fetches = {tile_rows_at(tile + i, width, NR), {}, source};
      kernel(words, reinterpret_cast<const Word*>(weight_at(j, p)), g.b_col / Words::STEP,
             panels + i * words, words * NR, tile + i, width, p > 0, fetches);
      source = fetches.source, i += vectors * VL;
    }
  }

  // Columns of C, whose sums are whole.
  template <class Out>
  void store_turned(Span columns) {
    for (int64_t i = 0; i < g.m; i += VL) {
      for (int64_t j = columns.begin; j < columns.end; j += VL) {
        const int lanes = static_cast<int>(min(VL, columns.end - j));
        vf block[VL];
#pragma GCC unroll 32
        for (int r = 0; r < VL; ++r)
          block[r] = r < lanes ? load_aligned(sums + (j - cols.begin + r) * width + i) : vf{};
        transpose(block);
        Out* out = static_cast<Out*>(g.c) + i * g.c_row + j;
#pragma GCC unroll 32
        for (int r = 0; r < VL; ++r) {
          if (i + r < g.m) store_lanes(out + r * g.c_row, block[r], lanes);
        }
      }
    }
  }
};

}  // namespace fm::FM_TARGET
