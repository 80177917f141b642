// The inner products of attention: small GEMMs on packed operands, MR x NV vectors of accumulators in registers.
//
//   C[i][lane] += sum over steps of a[step * LDA + i] * b[step * LANES + lane],      i < MR, lane < LANES = NV * VL
//
// a is read by broadcast loads, b by vector loads; attention_pack.h makes the three forms of operands that this needs.
// A word of an operand is one float (Singles), or a pair of bfloat16 of neighbouring steps where the target has a dot
// product of pairs (Pairs). Tested by tests/kernels/test_attention.py.
#pragma once
#include "transpose.h"

namespace fm::FM_TARGET {

constexpr int ATTENTION_MR = Tuning::ATTENTION_MR, ATTENTION_NV = Tuning::ATTENTION_NV;
constexpr int LANES = ATTENTION_NV * VL;

static_assert(LANES % ATTENTION_MR == 0 && VL % ATTENTION_MR == 0, "tiles end where vectors end");

struct Singles {
  using Word = float;
  static constexpr int STEP = 1;  // elements of the summed dimension in a word
};
FM_INLINE vf multiply_add(vf acc, float a, vf b) { return broadcast(a) * b + acc; }

#ifdef FM_HAS_BF16_PAIRS
struct Pairs {
  using Word = uint32_t;
  static constexpr int STEP = 2;
};
FM_INLINE vf multiply_add(vf acc, uint32_t a, vu b) { return dot_pairs(acc, broadcast(a), b); }
#endif

struct Tile {
  vf v[ATTENTION_MR][ATTENTION_NV];
};

// body(i, v) for every vector of a tile, unrolled.
template <class F>
FM_INLINE void for_tile(const F& body) {
#pragma GCC unroll 8
  for (int i = 0; i < ATTENTION_MR; ++i) {
#pragma GCC unroll 3
    for (int v = 0; v < ATTENTION_NV; ++v) body(i, v);
  }
}

FM_INLINE Tile load_tile(const float* c) {
  Tile t;
  for_tile([&](int i, int v) { t.v[i][v] = load_aligned(c + i * LANES + v * VL); });
  return t;
}

FM_INLINE void store_tile(float* c, const Tile& t) {
  for_tile([&](int i, int v) { store_aligned(c + i * LANES + v * VL, t.v[i][v]); });
}

template <class P, int LDA>
FM_INLINE void multiply(Tile& t, const typename P::Word* a, const typename P::Word* b, int64_t steps) {
  for (int64_t step = 0; step < steps; ++step, a += LDA, b += LANES) {
    decltype(load(b)) bv[ATTENTION_NV];
#pragma GCC unroll 3
    for (int v = 0; v < ATTENTION_NV; ++v) bv[v] = load(b + v * VL);
    for_tile([&](int i, int v) { t.v[i][v] = multiply_add(t.v[i][v], a[i], bv[v]); });
  }
}

// C[rows][LANES] += a b in memory, rows a multiple of MR; panel = words from one panel of a to the next.
template <class P>
FM_INLINE void accumulate(float* c, int64_t rows, const typename P::Word* a, int64_t panel, const typename P::Word* b,
                          int64_t steps) {
  for (int64_t row = 0; row < rows; row += ATTENTION_MR, a += panel) {
    Tile t = load_tile(c + row * LANES);
    multiply<P, ATTENTION_MR>(t, a, b, steps);
    store_tile(c + row * LANES, t);
  }
}

}  // namespace fm::FM_TARGET
