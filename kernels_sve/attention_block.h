// One block of queries against one block of keys in the backward pass: P and dS, then their products with what is
// packed. Lanes are keys; formulas in attention_backward.h, which includes this. Tested by
// tests/kernels/test_attention.py.
#pragma once
#include "attention_forward.h"

namespace fm::FM_TARGET {

constexpr int64_t LANE_GROUPS = BLOCK / LANES;

// What all tasks of a query head read, packed once, and where they leave their part of dQ, dK and dV. The keys are those of
// its group; a head that shares them with others has sums of its own, (s_padded / LANES, d_padded, LANES).
template <class P>
struct BackwardHead {
  typename P::Word *query_rows, *dout_rows;               // crosswise
  typename P::Word *query_columns, *dout_columns, *keys;  // columnwise
  float *lse, *delta;                                     // (s_padded): lse times log2(e); +inf and 0 beyond s
  float* dquery;                                          // (partials, s_padded / LANES, d_padded, LANES)
  float *dkey, *dvalue;
};

// Memory of one task. For one block of keys: key, value, dkey, dvalue (LANE_GROUPS, d, LANES). For one block of queries
// against it: arrays (LANE_GROUPS of keys, BLOCK queries, LANES), and dscore_crossed with the two exchanged.
template <class P>
struct BackwardBlock {
  using Word = typename P::Word;
  Word *key, *value, *prob_words, *dscore_words, *dscore_crossed;
  float *dkey, *dvalue;
  float *prob, *dscore;  // prob: negative where dropped
  int32_t* keep;         // dropout mask
  int64_t k0, q0, window;
  float c, keep_scale;
};

template <class P>
static BackwardBlock<P> backward_memory(int64_t d_padded) {
  constexpr int64_t SQUARE = BLOCK * BLOCK;
  const int64_t matrix = BLOCK * d_padded;
  float* at = static_cast<float*>(scratch(0, (4 * matrix + 6 * SQUARE) * sizeof(float)));
  const auto next = [&](int64_t floats) { return (at += floats) - floats; };
  const auto words = [&](int64_t floats) { return reinterpret_cast<typename P::Word*>(next(floats)); };
  BackwardBlock<P> m{};
  m.key = words(matrix), m.value = words(matrix), m.dkey = next(matrix), m.dvalue = next(matrix);
  m.prob = next(SQUARE), m.dscore = next(SQUARE);
  m.prob_words = words(SQUARE), m.dscore_words = words(SQUARE), m.dscore_crossed = words(SQUARE);
  m.keep = reinterpret_cast<int32_t*>(next(SQUARE));
  if (P::STEP == 1) m.dscore_words = reinterpret_cast<typename P::Word*>(m.dscore);
  return m;
}

// Rows r and r + 1 of group g of a block array, as operand words of the sums over queries.
template <class P>
FM_INLINE void store_words(typename P::Word* to, int64_t g, int64_t r, const vf (&x)[2 * ATTENTION_NV]) {
  to += (g * BLOCK + r) / P::STEP * LANES;
#pragma GCC unroll 3
  for (int v = 0; v < ATTENTION_NV; ++v) {
    if constexpr (P::STEP == 1) {
      store_aligned(to + v * VL, x[v]);
      store_aligned(to + LANES + v * VL, x[v + ATTENTION_NV]);
    } else {
#ifdef FM_HAS_BF16_PAIRS
      store(to + v * VL, to_pairs(x[v], x[v + ATTENTION_NV]));
#endif
    }
  }
}

// P of queries [r, r + MR) of the block against key group g.
template <class P, bool DROPOUT>
FM_INLINE void prob_tile(const BackwardHead<P>& head, const BackwardBlock<P>& m, int64_t words, int64_t g, int64_t r) {
  const int64_t q0 = m.q0 + r, at = (g * BLOCK + r) * LANES, k0 = m.k0 + g * LANES;
  Tile t = {};
  multiply<P, VL>(t, head.query_rows + q0 / VL * VL * words + q0 % VL, m.key + g * words * LANES, words);
  store_tile(m.prob + at, t);  // 24 accumulators leave no registers for the chains of 2^x
#pragma GCC unroll 1
  for (int i = 0; i < ATTENTION_MR; i += 2) {
    vf x[2 * ATTENTION_NV];
#pragma GCC unroll 6
    for (int v = 0; v < 2 * ATTENTION_NV; ++v) {
      x[v] = load_aligned(m.prob + at + i * LANES + v * VL) * m.c - broadcast(head.lse[q0 + i + v / ATTENTION_NV]);
    }
    exp2_each(x);
    if (q0 < k0 + LANES || k0 + m.window < q0 + ATTENTION_MR) {
#pragma GCC unroll 6
      for (int v = 0; v < 2 * ATTENTION_NV; ++v) {
        const vi key = (vi)lane_index() + static_cast<int32_t>(k0 + v % ATTENTION_NV * VL);
        x[v] = hidden(static_cast<int32_t>(q0 + i + v / ATTENTION_NV) - key, m.window) ? vf{} : x[v];
      }
    }
    if constexpr (DROPOUT || P::STEP == 2) {
#pragma GCC unroll 6
      for (int v = 0; v < 2 * ATTENTION_NV; ++v) {
        const int64_t to = at + i * LANES + v * VL;
        const vi keep = DROPOUT ? (vi)load(reinterpret_cast<uint32_t*>(m.keep) + to) : vi{} - 1;
        store_aligned(m.prob + to, keep ? x[v] : -x[v]);
        x[v] = keep ? x[v] : vf{};
      }
    }
    store_words<P>(DROPOUT || P::STEP == 2 ? m.prob_words : reinterpret_cast<typename P::Word*>(m.prob), g, r + i, x);
  }
}

// dS of the same tile.
template <class P, bool DROPOUT>
FM_INLINE void dscore_tile(const BackwardHead<P>& head, const BackwardBlock<P>& m, int64_t words, int64_t g,
                           int64_t r) {
  const int64_t q0 = m.q0 + r, at = (g * BLOCK + r) * LANES;
  Tile t = {};
  multiply<P, VL>(t, head.dout_rows + q0 / VL * VL * words + q0 % VL, m.value + g * words * LANES, words);
#pragma GCC unroll 4
  for (int i = 0; i < ATTENTION_MR; i += 2) {
    vf x[2 * ATTENTION_NV];
#pragma GCC unroll 6
    for (int v = 0; v < 2 * ATTENTION_NV; ++v) {
      const vf delta = broadcast(head.delta[q0 + i + v / ATTENTION_NV]);
      const vf prob = load_aligned(m.prob + at + i * LANES + v * VL);
      const vf dprob = t.v[i + v / ATTENTION_NV][v % ATTENTION_NV];
      x[v] = DROPOUT ? abs(prob) * ((prob > 0.0f ? dprob * m.keep_scale : vf{}) - delta) : prob * (dprob - delta);
      store_aligned(m.dscore + at + i * LANES + v * VL, x[v]);
    }
    if constexpr (P::STEP == 2) store_words<P>(m.dscore_words, g, r + i, x);
  }
}

// dS of key group g, queries [r, r + VL), to dscore_crossed.
template <class P>
FM_INLINE void cross_dscore(const BackwardBlock<P>& m, int64_t g, int64_t r) {
  typename P::Word* to = m.dscore_crossed + (r / LANES * BLOCK + g * LANES) / P::STEP * LANES + r % LANES;
  for (int v = 0; v < ATTENTION_NV; ++v, to += VL / P::STEP * LANES) {
    vf tile[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; ++i) tile[i] = load_aligned(m.dscore + (g * BLOCK + r + i) * LANES + v * VL);
    transpose(tile);
#pragma GCC unroll 16
    for (int i = 0; i < VL; i += P::STEP) {
      if constexpr (P::STEP == 1) {
        store_aligned(to + i * LANES, tile[i]);
      } else {
#ifdef FM_HAS_BF16_PAIRS
        store(to + i / 2 * LANES, to_pairs(tile[i], tile[i + 1]));
#endif
      }
    }
  }
}

// The first query of the block, counted from q0, that sees a key of group g.
template <class P>
FM_INLINE int64_t first_query(const BackwardBlock<P>& m, int64_t g) {
  return max(0, m.k0 + g * LANES - m.q0);
}

// Where those queries end, by whole groups of lanes.
template <class P>
FM_INLINE int64_t end_query(const BackwardBlock<P>& m, int64_t g) {
  return min(BLOCK, round_up(max(0, m.k0 + (g + 1) * LANES - 1 + m.window - m.q0), LANES));
}

// P and dS of one block of queries against one block of keys.
template <class P, bool DROPOUT>
static void block_scores(const BackwardHead<P>& head, const BackwardBlock<P>& m, int64_t words) {
  for (int64_t g = 0; g < LANE_GROUPS; ++g) {
    const int64_t end = end_query(m, g);
    for (int64_t r = first_query(m, g); r < end; r += ATTENTION_MR) prob_tile<P, DROPOUT>(head, m, words, g, r);
  }
  for (int64_t g = 0; g < LANE_GROUPS; ++g) {
    const int64_t end = end_query(m, g);
    for (int64_t r = first_query(m, g); r < end; r += ATTENTION_MR) dscore_tile<P, DROPOUT>(head, m, words, g, r);
    for (int64_t r = first_query(m, g); r < end; r += VL) cross_dscore(m, g, r);
  }
}

// The three sums that follow, each over the groups of lanes that have been written.
template <class P>
static void block_gradients(const BackwardHead<P>& head, const BackwardBlock<P>& m, const AttentionShape& shape,
                            typename P::Word* prob_words, float* dquery) {
  const int64_t panel = shape.s_padded / P::STEP * ATTENTION_MR, rows = shape.d_padded;
  for (int64_t g = 0; g < LANE_GROUPS; ++g) {
    const int64_t r = first_query(m, g), steps = (end_query(m, g) - r) / P::STEP;
    if (steps <= 0) continue;
    const int64_t a = (m.q0 + r) / P::STEP * ATTENTION_MR, b = (g * BLOCK + r) / P::STEP * LANES;
    accumulate<P>(m.dvalue + g * rows * LANES, rows, head.dout_columns + a, panel, prob_words + b, steps);
    accumulate<P>(m.dkey + g * rows * LANES, rows, head.query_columns + a, panel, m.dscore_words + b, steps);
  }
  for (int64_t g = 0; g < LANE_GROUPS; ++g) {
    const int64_t q0 = m.q0 + g * LANES, end = min(BLOCK, q0 + LANES - m.k0);
    const int64_t k = max(0, q0 + 1 - m.window - m.k0) / LANES * LANES, steps = (end - k) / P::STEP;
    if (steps <= 0) continue;
    accumulate<P>(dquery + q0 * rows, rows, head.keys + (m.k0 + k) / P::STEP * ATTENTION_MR, panel,
                  m.dscore_crossed + (g * BLOCK + k) / P::STEP * LANES, steps);
  }
}

// keep, for BLOCK queries from q0 against BLOCK keys from k0.
template <class P>
static void block_dropout(const HeadDropout& dropout, const BackwardBlock<P>& m) {
  for (int64_t r = 0; r < BLOCK; ++r) {
    const uint32_t row = dropout.row0 + static_cast<uint32_t>(m.q0 + r);
    for_philox_row(dropout.key, dropout.sample, row, m.k0, BLOCK, [&](const vu* words, int64_t i, int v) {
      store(reinterpret_cast<uint32_t*>(m.keep) + (i / LANES * BLOCK + r) * LANES + i % LANES,
            (vu)(words[v] >= dropout.threshold));
    });
  }
}

}  // namespace fm::FM_TARGET
