// The GEMM micro-kernel: a tile of ROWS x NR accumulators that stay in registers over the whole k-loop.
// Both operands are packed: A as [k][MR] words, read by broadcast; B as [k][NR] words, read as vectors. A word is a
// float, or a pair of consecutive k in bfloat16 where the target has a dot product of pairs (BF16_DOT). Where sums are
// in FP16 (gemm_half.h), a word of A is one half and a word of B two neighbouring columns. Where the target multiplies
// 2 x 4 by 4 x 2 (BF16_QUADS), the pairs of four k lie side by side: gemm_quads.h.
// The tile is tuning.h's; on A64FX a broadcast is one LD1RW. docs/kernels-howto.md
#pragma once
#include "gemm/gemm_fetch.h"
#include "gemm/magnitude_bits.h"
#include "simd/rounding_word.h"
#include "simd/tiles.h"

namespace fm::FM_TARGET {

constexpr int MR = Tuning::GEMM_MR, NR_VECTORS = Tuning::GEMM_NR_VECTORS;
constexpr int UNROLL = Tuning::GEMM_UNROLL;
constexpr int NR = NR_VECTORS * VL;
constexpr int ROW_UNIT = MR >= 8 ? 4 : 2;  // tiles at the bottom have a multiple of this many rows
static_assert(MR % ROW_UNIT == 0, "tiles of fewer rows come in steps of ROW_UNIT");

// Sums of the micro-kernel below: its rows, and the step in which a tile at the bottom has fewer.
struct VectorSums {
  static constexpr int TILE_ROWS = MR, ROW_STEP = ROW_UNIT;
  static constexpr bool TILES = false;  // of tiles.h
  static constexpr int PARTS = 1;       // of an element, each in a panel of its own: gemm_split.h
  static constexpr bool INT8 = false;   // sums in int32 of quantized operands: gemm_int8.h
  FM_INLINE vf add(vf a, vf b) { return a + b; }
};

// Elements as words: how they are read for packing and multiplied. A tile is TILE_ROWS rows and WIDE * NR columns, and so a
// step of k is TILE_ROWS words of A and NR words of B.
struct FloatWords : VectorSums {
  using Word = float;
  static constexpr int WIDE = 1;    // rows or columns in 32 bits
  static constexpr int STEP = 1;    // k per word
  static constexpr int BESIDE = 1;  // words of consecutive k that lie side by side in a panel
  template <class T>
  FM_INLINE vf along_k(const T* p, int64_t elements) {
    return elements >= VL ? load(p) : load_n(p, static_cast<int>(elements));
  }
  template <class T>
  FM_INLINE vf across_k(const T* p, int64_t, int64_t, int lanes) {
    return load_lanes(p, lanes);
  }
  FM_INLINE vf multiply_add(Word x, vf b, vf sum) { return broadcast(x) * b + sum; }
  FM_INLINE vf sum_words(const Word* words, int lanes, vf sum) {
    return load_n(words, lanes) + sum;
  }
};

#ifdef FM_HAS_BF16_PAIRS
struct Bf16Pairs : VectorSums, StoredPairs {
  using Word = uint32_t;
  static constexpr int WIDE = 1;
  static constexpr int STEP = 2;
#ifdef FM_HAS_BF16_QUADS
  static constexpr int BESIDE = 2;
#else
  static constexpr int BESIDE = 1;
#endif
  FM_INLINE vf multiply_add(Word x, vf b, vf sum) { return dot_pairs(sum, broadcast(x), (vu)b); }
#ifdef FM_HAS_BF16_QUADS
  FM_INLINE vf multiply_quads(vf sum, vu a, vu b) {
    return fm::FM_TARGET::multiply_quads(sum, a, b);
  }
#endif
  FM_INLINE vf sum_words(const Word* p, int lanes, vf sum) {
    const vu words = (vu)load_n(reinterpret_cast<const float*>(p), lanes);
    return (sum + bf16_to_float(words & 0xffffu)) + (vf)(words & 0xffff0000u);
  }
};
#endif

#include "gemm/gemm_int8.h"

// Words of one part of a panel for `depth` elements of k, those beyond it zeros.
template <class Words>
FM_INLINE int64_t words_of(int64_t depth) {
  constexpr int STEP = Words::STEP * Words::BESIDE;
  return (depth + STEP - 1) / STEP * Words::BESIDE;
}

// Words of all parts of such a panel.
template <class Words>
FM_INLINE int64_t panel_words(int64_t depth) {
  return Words::PARTS * words_of<Words>(depth);
}

// Calls f(reader, place) for every part of an element: what reads it, as Words do, and its place in a panel of A or of B.
template <class Words, bool IS_A, class F>
FM_INLINE void for_parts([[maybe_unused]] const Scales& scales, const F& f) {
  if constexpr (Words::INT8 && IS_A) {
    if (scales.origin)
      f(Int8Reader<true, Words::BESIDE, true>(), 0);
    else
      f(Int8Reader<true, Words::BESIDE>(), 0);
  } else if constexpr (Words::INT8) {
    f(Int8Reader<false, Words::BESIDE>(), 0);
  } else if constexpr (Words::PARTS == 1) {
    f(Words(), 0);
  } else {
    f(typename Words::template Part<IS_A ? 2 : 0>(), 0);
    f(typename Words::template Part<1>(), 1);
    f(typename Words::template Part<IS_A ? 0 : 2>(), 2);
  }
}

// C = A B, or C += A B when `add`, for panels of `words` steps of k. C has ROWS full rows of NR. Halves are not added: they are no
// floats. The results that are fetched are those of this tile, which need not go to C at once.
template <class Words, int ROWS>
static __attribute__((noinline)) void micro_kernel(int64_t words, const typename Words::Word* a,
                                                   const float* b, float* c, int64_t ldc, bool add,
                                                   Fetches& fetches) {
  vf sum[ROWS][NR_VECTORS] = {};
  fetches.begin(ROWS, words);
  const auto* const all_a = a;
  const float* const all_b = b;
#pragma GCC unroll 1
  for (int run = 0; run < Words::PARTS; ++run) {
    const int64_t first = run * (words / Words::PARTS), count = words - first;
    a = all_a + first * MR, b = all_b;
    for (int64_t k = 0; k < count;) {
      fetches.turn();
      const int64_t end = min(count, k + Fetches::STEPS);
#pragma GCC unroll UNROLL
      for (; k < end; ++k) {
        vf column[NR_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < NR_VECTORS; ++v) column[v] = load_aligned(b + v * VL);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
          for (int v = 0; v < NR_VECTORS; ++v)
            sum[r][v] = Words::multiply_add(a[r], column[v], sum[r][v]);
        }
        a += MR;
        b += NR;
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < NR_VECTORS; ++v) {
      float* p = c + r * ldc + v * VL;
      store(p, Words::WIDE == 1 && add ? Words::add(load(p), sum[r][v]) : sum[r][v]);
    }
  }
}

#ifdef FM_HAS_BF16_QUADS
#include "gemm/gemm_quads.h"
#endif
#ifdef FM_HAS_TILES
#include "gemm/gemm_tiles.h"
#endif
#include "gemm/gemm_split.h"

template <class Words>
using MicroKernel = void (*)(int64_t, const typename Words::Word*, const float*, float*, int64_t,
                             bool, Fetches&);

// The kernel of the fewest rows that covers `rows`.
template <class Words, int ROWS = Words::TILE_ROWS>
FM_INLINE MicroKernel<Words> micro_kernel_for(int64_t rows) {
  if constexpr (ROWS > Words::ROW_STEP) {
    if (rows <= ROWS - Words::ROW_STEP)
      return micro_kernel_for<Words, ROWS - Words::ROW_STEP>(rows);
  }
#ifdef FM_HAS_TILES
  if constexpr (Words::TILES) return &tiles_kernel<Words, ROWS>;
#endif
#ifdef FM_HAS_BF16_QUADS
  if constexpr (Words::BESIDE == 2) return &quads_kernel<Words, ROWS>;
#endif
  return &micro_kernel<Words, ROWS>;
}

}  // namespace fm::FM_TARGET
