// The inner products of attention: small GEMMs on packed operands, MR x NV vectors of accumulators in registers.
//
//   C[i][lane] += sum over steps of a[step * LDA + i] * b[step * LANES + lane],      i < MR, lane < LANES = NV * VL
//
// a is read by broadcast loads, b by vector loads; attention_pack.h makes the three forms of operands that this needs.
// A word of an operand is one float (Singles), or a pair of bfloat16 of neighbouring steps where the target has a dot
// product of pairs (Pairs), or such a pair of an operand of matrix tiles (Tiles, tiles.h). Tested by tests/kernels/test_attention.py.
#pragma once
#include "simd/tiles.h"

namespace fm::FM_TARGET {

constexpr int ATTENTION_MR = Tuning::ATTENTION_MR, ATTENTION_NV = Tuning::ATTENTION_NV;
constexpr int LANES = ATTENTION_NV * VL;

static_assert(LANES % ATTENTION_MR == 0 && VL % ATTENTION_MR == 0, "tiles end where vectors end");

struct Singles {
  using Word = float;
  static constexpr int STEP = 1;  // elements of the summed dimension in a word
  static constexpr bool TILES = false;
  static constexpr int PANEL_ROWS = ATTENTION_MR,
                       EDGE = VL;  // rows of a panel of a; lanes in which the end of s is seen
};
FM_INLINE vf multiply_add(vf acc, float a, vf b) { return broadcast(a) * b + acc; }

#ifdef FM_HAS_BF16_PAIRS
struct Pairs : Singles {
  using Word = uint32_t;
  static constexpr int STEP = 2;
};
FM_INLINE vf multiply_add(vf acc, uint32_t a, vu b) { return dot_pairs(acc, broadcast(a), b); }
#endif

#ifdef FM_HAS_TILES
// Tiles have no lanes to leave out: what is beside the diagonal is zeros.
struct Tiles : Pairs {
  static constexpr bool TILES = true;
  static constexpr int PANEL_ROWS = TILE_COLUMNS, EDGE = LANES;
};
constexpr int ATTENTION_UNIT = TILE_COLUMNS;
static_assert(LANES == TILE_COLUMNS && TILE_DEPTH == TILE_COLUMNS,
              "b is an operand of tiles as it lies");
#else
constexpr int ATTENTION_UNIT = ATTENTION_MR;  // columns of a head and keys come in steps of it
#endif

struct Tile {
  vf v[ATTENTION_MR][ATTENTION_NV];
};

// The vectors [FIRST, END) of a tile that are worked on: beside the diagonal, the others are pairs of a query and a key that do
// not see each other.
template <int FIRST, int END>
struct Vectors {
  static constexpr int first = FIRST, end = END;
};
using AllVectors = Vectors<0, ATTENTION_NV>;

// f(Vectors<0, end>()) for 1 <= end <= NV.
template <class P, int END = ATTENTION_NV, class F>
FM_INLINE void with_vectors(int64_t end, const F& f) {
  if constexpr (END > 1 && !P::TILES) {
    if (end < END) return with_vectors<P, END - 1>(end, f);
  }
  f(Vectors<0, END>());
}

FM_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return max(low, min(high, x)); }

// Lanes are queries, rows [begin, end) are keys, and query 0 is key `diagonal`: f(vectors, begin, end) for each run of keys that
// the same of the first END vectors see.
template <class P, int END, int FIRST = 0, class F>
FM_INLINE void for_seen_keys(int64_t diagonal, int64_t begin, int64_t end, const F& f) {
  constexpr bool MORE = FIRST + 1 < END && !P::TILES;
  const int64_t last = MORE ? clamp(diagonal + (FIRST + 1) * VL, begin, end) : end;
  if (begin < last) f(Vectors<FIRST, END>(), begin, last);
  if constexpr (MORE) for_seen_keys<P, END, FIRST + 1>(diagonal, last, end, f);
}

// The same with lanes of keys and rows of queries, where key 0 is query `diagonal`; begin >= diagonal.
template <class P, int END = P::TILES ? ATTENTION_NV : 1, class F>
FM_INLINE void for_seeing_queries(int64_t diagonal, int64_t begin, int64_t end, const F& f) {
  const int64_t last = END < ATTENTION_NV ? clamp(diagonal + END * VL, begin, end) : end;
  if (begin < last) f(Vectors<0, END>(), begin, last);
  if constexpr (END < ATTENTION_NV) for_seeing_queries<P, END + 1>(diagonal, last, end, f);
}

// body(i, v) for each of a tile's vectors, unrolled.
template <class V = AllVectors, class F>
FM_INLINE void for_tile(const F& body, V = {}) {
#pragma GCC unroll 8
  for (int i = 0; i < ATTENTION_MR; ++i) {
#pragma GCC unroll 3
    for (int v = V::first; v < V::end; ++v) body(i, v);
  }
}

FM_INLINE Tile load_tile(const float* c) {
  Tile t;
  for_tile([&](int i, int v) { t.v[i][v] = load_aligned(c + i * LANES + v * VL); });
  return t;
}

template <class V = AllVectors>
FM_INLINE void store_tile(float* c, const Tile& t, V vectors = {}) {
  for_tile([&](int i, int v) { store_aligned(c + i * LANES + v * VL, t.v[i][v]); }, vectors);
}

template <class P, int LDA, class V>
FM_INLINE void multiply(Tile& t, const typename P::Word* a, const typename P::Word* b,
                        int64_t steps, V vectors) {
  for (int64_t step = 0; step < steps; ++step, a += LDA, b += LANES) {
    decltype(load(b)) bv[ATTENTION_NV];
#pragma GCC unroll 3
    for (int v = V::first; v < V::end; ++v) bv[v] = load(b + v * VL);
    for_tile([&](int i, int v) { t.v[i][v] = multiply_add(t.v[i][v], a[i], bv[v]); }, vectors);
  }
}

// The tile of rows [row, row + MR) of a panel packed crosswise times b. Tiles make all of their rows with the first, at `made`.
template <class P, class V>
FM_INLINE Tile product([[maybe_unused]] float* made, const typename P::Word* a, int64_t row,
                       const typename P::Word* b, int64_t words, [[maybe_unused]] V vectors) {
#ifdef FM_HAS_TILES
  if (row % P::PANEL_ROWS == 0) {
    zero_sums<2>();
    multiply_tiles<2>(a + row * words, b, words / TILE, [] {});
    store_sums<2>(made, SUMS_ROW);
  }
  return load_tile(made);
#else
  Tile t = {};
  multiply<P, VL>(t, a + row / VL * VL * words + row % VL, b, words, vectors);
  return t;
#endif
}

// Steps [begin, end) of a sum over s, onto what the tile holds.
template <class P, class V>
FM_INLINE void multiply_rows(Tile& t, const typename P::Word* a, const typename P::Word* b,
                             int64_t begin, int64_t end, V vectors) {
  multiply<P, ATTENTION_MR>(t, a + begin / P::STEP * ATTENTION_MR, b + begin / P::STEP * LANES,
                            (end - begin) / P::STEP, vectors);
}

// Words that are read soon, into L2.
template <class Word>
FM_INLINE void fetch(const Word* from, int64_t count) {
  for (int64_t i = 0; i < count; i += Tuning::LINE / 4) prefetch_l2(from + i);
}

// C[rows][LANES] += a b in memory, or = a b where `fresh`, rows a multiple of PANEL_ROWS; panel = words from one panel of a to the next.
// runs(f) calls f(vectors, begin, end) for the runs of rows of a and b that the sum goes over; before(row) runs ahead of each panel.
template <class P, class Runs, class Before>
FM_INLINE void accumulate(float* c, bool fresh, int64_t rows, const typename P::Word* a,
                          int64_t panel, const typename P::Word* b, const Runs& runs,
                          const Before& before) {
#ifdef FM_HAS_TILES
  for (int64_t row = 0; row < rows; row += P::PANEL_ROWS, a += panel) {
    before(row);
    fresh ? zero_sums<2>() : load_sums<2>(c + row * LANES, SUMS_ROW);
    runs([&](auto, int64_t begin, int64_t end) FM_INLINE_LAMBDA {
      multiply_tiles<2>(a + begin / P::STEP * P::PANEL_ROWS, b + begin / P::STEP * LANES,
                        (end - begin) / TILE_DEPTH, [] {});
    });
    store_sums<2>(c + row * LANES, SUMS_ROW);
  }
#else
  for (int64_t row = 0; row < rows; row += ATTENTION_MR, a += panel) {
    before(row);
    Tile t = {};
    if (!fresh) t = load_tile(c + row * LANES);
    runs([&](auto vectors, int64_t begin, int64_t end) FM_INLINE_LAMBDA {
      multiply_rows<P>(t, a, b, begin, end, vectors);
    });  // or the tile leaves its registers
    store_tile(c + row * LANES, t);
  }
#endif
}

}  // namespace fm::FM_TARGET
