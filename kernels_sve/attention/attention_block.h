// One block of queries against one block of keys in the backward pass: P and dS, then their products with what is
// packed. Lanes are keys; formulas in attention_backward.h, which includes this. Tested by
// tests/kernels/test_attention.py.
#pragma once
#include "attention/attention_forward.h"

namespace fm::FM_TARGET {

constexpr int64_t LANE_GROUPS = BLOCK / LANES;

// What all tasks of a query head read, packed once, and where they leave their part of dQ, dK and dV. The keys are those of
// its group; a head that shares them with others has sums of its own, (keys_padded / LANES, columns, LANES). Each begins at the
// position 0, whether or not that is packed.
template <class P>
struct BackwardHead {
  typename P::Word *query_rows, *dout_rows;               // crosswise
  typename P::Word *query_columns, *dout_columns, *keys;  // columnwise
  float *lse, *delta;  // (queries_padded): lse times log2(e); +inf and 0 for others
  float* dquery;       // (partials, queries_padded / LANES, key_columns, LANES)
  float *dkey, *dvalue;
};

// Memory of one task. For one block of keys: key, value, dkey, dvalue (LANE_GROUPS, columns, LANES). For one block of queries
// against it: arrays (LANE_GROUPS of keys, BLOCK queries, LANES), and dscore_crossed with the two exchanged.
template <class P>
struct BackwardBlock {
  using Word = typename P::Word;
  Word *key, *value, *prob_words, *dscore_words, *dscore_crossed;
  float *dkey, *dvalue;
  float *prob,
      *dscore;  // prob: negative where dropped; dscore: rows of words, two neighbouring keys in each where STEP is 2
  int32_t* keep;  // dropout mask
  int64_t k0, q0, first_q0, window, queries_end, keys_end;
  int64_t seen_to[LANE_GROUPS];  // where the queries end that see a key of the group
  float c, keep_scale;
  bool
      far;  // what is packed of the queries is too large for a cache: the next block of them is fetched while one is worked on
  Documents documents;
};

template <class P>
static BackwardBlock<P> backward_memory(const AttentionShape& shape, const Documents& documents) {
  constexpr int64_t SQUARE = BLOCK * BLOCK;
  const int64_t keys = BLOCK * shape.key_columns, values = BLOCK * shape.value_columns;
  float* at = static_cast<float*>(scratch(0, (2 * (keys + values) + 6 * SQUARE) * sizeof(float)));
  const auto next = [&](int64_t floats) { return (at += floats) - floats; };
  const auto words = [&](int64_t floats) {
    return reinterpret_cast<typename P::Word*>(next(floats));
  };
  BackwardBlock<P> m{};
  m.documents = documents;
  m.key = words(keys), m.value = words(values), m.dkey = next(keys), m.dvalue = next(values);
  m.prob = next(SQUARE), m.dscore = next(SQUARE);
  m.prob_words = words(SQUARE), m.dscore_words = words(SQUARE), m.dscore_crossed = words(SQUARE);
  m.keep = reinterpret_cast<int32_t*>(next(SQUARE));
  if (P::STEP == 1) m.dscore_words = reinterpret_cast<typename P::Word*>(m.dscore);
  return m;
}

// The first N vectors of rows r and r + 1 of group g of a block array, as operand words of the sums over queries.
template <class P, int N>
FM_INLINE void store_words(typename P::Word* to, int64_t g, int64_t r, const vf (&x)[2][N]) {
  to += (g * BLOCK + r) / P::STEP * LANES;
#pragma GCC unroll 3
  for (int v = 0; v < N; ++v) {
    if constexpr (P::STEP == 1) {
      store_aligned(to + v * VL, x[0][v]);
      store_aligned(to + LANES + v * VL, x[1][v]);
    } else {
#ifdef FM_HAS_BF16_PAIRS
      store(to + v * VL, to_pairs(x[0][v], x[1][v]));
#endif
    }
  }
}

// body(i, v) for two rows of N vectors, unrolled.
template <int N, class F>
FM_INLINE void for_two_rows(const F& body) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 3
    for (int v = 0; v < N; ++v) body(i, v);
  }
}

// P of queries [r, r + MR) of the block against key group g.
template <class P, bool DROPOUT, class V>
FM_INLINE void prob_tile(const BackwardHead<P>& head, const BackwardBlock<P>& m, int64_t words,
                         int64_t g, int64_t r, V vectors) {
  const int64_t q0 = m.q0 + r, at = (g * BLOCK + r) * LANES, k0 = m.k0 + g * LANES;
  const Tile t =
      product<P>(m.prob + at, head.query_rows, q0, m.key + g * words * LANES, words, vectors);
  if constexpr (!P::TILES)
    store_tile(m.prob + at, t,
               vectors);  // 24 accumulators leave no registers for the chains of 2^x
#pragma GCC unroll 1
  for (int row = 0; row < ATTENTION_MR; row += 2) {
    vf x[2][V::end];
    const auto place = [&](int i, int v) { return at + (row + i) * LANES + v * VL; };
    for_two_rows<V::end>([&](int i, int v) {
      x[i][v] = load_aligned(m.prob + place(i, v)) * m.c - broadcast(head.lse[q0 + row + i]);
    });
    exp2_each(reinterpret_cast<vf(&)[2 * V::end]>(x));
    if (q0 < k0 + V::end * VL || k0 + m.window < q0 + ATTENTION_MR) {
      for_two_rows<V::end>([&](int i, int v) {
        const vi key = (vi)lane_index() + static_cast<int32_t>(k0 + v * VL);
        x[i][v] = hidden(static_cast<int32_t>(q0 + row + i) - key, m.window) ? vf{} : x[i][v];
      });
    }
    if (k0 < m.documents.seen_from(q0 + row + 1) || k0 + V::end * VL > m.keys_end) {
      for_two_rows<V::end>([&](int i, int v) {
        const vi key = (vi)lane_index() + static_cast<int32_t>(k0 + v * VL);
        const int64_t first = m.documents.seen_from(q0 + row + i);
        x[i][v] =
            hidden(key - static_cast<int32_t>(first), max(0, m.keys_end - first)) ? vf{} : x[i][v];
      });
    }
    if constexpr (DROPOUT || P::STEP == 2) {
      for_two_rows<V::end>([&](int i, int v) {
        const vi keep =
            DROPOUT ? (vi)load(reinterpret_cast<uint32_t*>(m.keep) + place(i, v)) : vi{} - 1;
        store_aligned(m.prob + place(i, v), keep ? x[i][v] : -x[i][v]);
        x[i][v] = keep ? x[i][v] : vf{};
      });
    }
    store_words<P>(
        DROPOUT || P::STEP == 2 ? m.prob_words : reinterpret_cast<typename P::Word*>(m.prob), g,
        r + row, x);
  }
}

// dS of the same tile.
template <class P, bool DROPOUT, class V>
FM_INLINE void dscore_tile(const BackwardHead<P>& head, const BackwardBlock<P>& m, int64_t words,
                           int64_t g, int64_t r, V vectors) {
  const int64_t q0 = m.q0 + r, at = (g * BLOCK + r) * LANES;
  const Tile t =
      product<P>(m.dscore + at, head.dout_rows, q0, m.value + g * words * LANES, words, vectors);
#pragma GCC unroll 4
  for (int row = 0; row < ATTENTION_MR; row += 2) {
    vf x[2][V::end];
    for_two_rows<V::end>([&](int i, int v) {
      const int64_t place = at + (row + i) * LANES + v * VL;
      const vf delta = broadcast(head.delta[q0 + row + i]), prob = load_aligned(m.prob + place),
               dprob = t.v[row + i][v];
      x[i][v] = DROPOUT ? abs(prob) * ((prob > 0.0f ? dprob * m.keep_scale : vf{}) - delta)
                        : prob * (dprob - delta);
      if constexpr (P::STEP == 1) store_aligned(m.dscore + place, x[i][v]);
    });
#ifdef FM_HAS_BF16_PAIRS
    if constexpr (P::STEP == 2) {
      store_words<P>(m.dscore_words, g, r + row, x);
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
#pragma GCC unroll 2
        for (int v = 0; v < V::end; v += 2) {
          const vu words = to_row(x[i][v], v + 1 < V::end ? x[i][v + 1] : vf{});
          store_aligned(m.dscore + at + (row + i) * LANES + v / 2 * VL, (vf)words);
        }
      }
    }
#endif
  }
}

// dS of the first vectors of key group g, queries [r, r + VL), to dscore_crossed; the words of a row lie side by side in dscore.
template <class P, class V>
FM_INLINE void cross_dscore(const BackwardBlock<P>& m, int64_t g, int64_t r, V) {
  constexpr int WORDS = V::end * VL / P::STEP;
  float* to = reinterpret_cast<float*>(m.dscore_crossed) +
              (r / LANES * BLOCK + g * LANES) / P::STEP * LANES + r % LANES;
#pragma GCC unroll 3
  for (int w = 0; w < WORDS; w += VL) {
    vf tile[VL];
#pragma GCC unroll 16
    for (int i = 0; i < VL; ++i) tile[i] = load_aligned(m.dscore + (g * BLOCK + r + i) * LANES + w);
    transpose(tile);
#pragma GCC unroll 16
    for (int i = 0; i < VL; ++i) {
      if (w + i < WORDS) store_aligned(to + (w + i) * LANES, tile[i]);
    }
  }
}

// The first query of the block, counted from q0, that sees a key of group g.
template <class P>
FM_INLINE int64_t first_query(const BackwardBlock<P>& m, int64_t g) {
  return max(0, m.k0 + g * LANES - m.q0);
}

// Where those queries end: by whole groups of lanes at the edge of the window or document, by whole vectors at the end of the queries.
template <class P>
FM_INLINE int64_t end_query(const BackwardBlock<P>& m, int64_t g) {
  return min(min(BLOCK, round_up(max(0, m.seen_to[g] - m.q0), LANES)),
             round_up(max(0, m.queries_end - m.q0), P::EDGE));
}

// f(vectors, begin, end) for the runs of queries that see the same vectors of key group g.
template <class P, class F>
FM_INLINE void for_queries(const BackwardBlock<P>& m, int64_t g, const F& f) {
  for_seeing_queries<P>(m.k0 + g * LANES - m.q0, first_query(m, g), end_query(m, g), f);
}

// Of the next block of queries, the share that is fetched with the tile of queries [r, r + MR) and key group g.
template <class P>
FM_INLINE void fetch_rows(const BackwardBlock<P>& m, const typename P::Word* rows, int64_t words,
                          int64_t g, int64_t r) {
  if (m.far)
    fetch(rows + (m.q0 + BLOCK + (g * BLOCK + r) / LANE_GROUPS) * words,
          ATTENTION_MR * words / LANE_GROUPS);
}

// P and dS of one block of queries against one block of keys. Inside backward_task its registers do not suffice.
template <class P, bool DROPOUT>
static __attribute__((noinline)) void block_scores(const BackwardHead<P>& head,
                                                   const BackwardBlock<P>& m, int64_t key_words,
                                                   int64_t value_words) {
  for (int64_t g = 0; g < LANE_GROUPS; ++g) {
    for_queries(m, g, [&](auto vectors, int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r += ATTENTION_MR) {
        fetch_rows(m, head.query_rows, key_words, g, r);
        prob_tile<P, DROPOUT>(head, m, key_words, g, r, vectors);
      }
    });
    for_queries(m, g, [&](auto vectors, int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r += ATTENTION_MR) {
        fetch_rows(m, head.dout_rows, value_words, g, r);
        dscore_tile<P, DROPOUT>(head, m, value_words, g, r, vectors);
      }
      for (int64_t r = begin; r < end; r += VL) cross_dscore(m, g, r, vectors);
    });
  }
}

// The three sums that follow, each over the groups of lanes that have been written. fresh_queries: no block of keys has added to
// dQ of these queries.
template <class P>
static void block_gradients(const BackwardHead<P>& head, const BackwardBlock<P>& m,
                            const AttentionShape& shape, typename P::Word* prob_words,
                            float* dquery, bool fresh_queries) {
  const int64_t panel = shape.queries_padded / P::STEP * P::PANEL_ROWS, rows = shape.key_columns;
  const int64_t key_panel = shape.keys_padded / P::STEP * P::PANEL_ROWS;
  constexpr int64_t SHARE =
      LANES / P::STEP *
      P::PANEL_ROWS;  // of a panel, fetched for the next block of queries with a key group
  for (int64_t g = 0; g < LANE_GROUPS; ++g) {
    const bool fresh = m.q0 == m.first_q0;
    if (!fresh && end_query(m, g) <= first_query(m, g)) continue;
    const int64_t a = m.q0 / P::STEP * P::PANEL_ROWS, b = g * BLOCK / P::STEP * LANES;
    const auto queries = [&](const auto& f) FM_INLINE_LAMBDA { for_queries(m, g, f); };
    const auto sum = [&](float* to, int64_t rows, const typename P::Word* columns,
                         const typename P::Word* words) FM_INLINE_LAMBDA {
      accumulate<P>(to + g * rows * LANES, fresh, rows, columns + a, panel, words + b, queries,
                    [&](int64_t row) FM_INLINE_LAMBDA {
                      if (m.far)
                        fetch(columns + a + row / P::PANEL_ROWS * panel + (LANE_GROUPS + g) * SHARE,
                              SHARE);
                    });
    };
    sum(m.dvalue, shape.value_columns, head.dout_columns, prob_words);
    sum(m.dkey, rows, head.query_columns, m.dscore_words);
  }
  for (int64_t g = 0; g < LANE_GROUPS; ++g) {
    const int64_t q0 = m.q0 + g * LANES;
    if (q0 >= m.queries_end) continue;
    const int64_t begin =
        max(0, max(q0 + 1 - m.window, m.documents.start(q0)) - m.k0) / LANES * LANES;
    with_vectors<P>((m.queries_end - q0 + VL - 1) / VL, [&](auto vectors) {
      const int64_t end =
          min(min(BLOCK, q0 + vectors.end * VL - m.k0), round_up(m.keys_end - m.k0, LANES));
      if (end <= begin && !fresh_queries) return;
      accumulate<P>(
          dquery + q0 * rows, fresh_queries, rows, head.keys + m.k0 / P::STEP * P::PANEL_ROWS,
          key_panel, m.dscore_crossed + g * BLOCK / P::STEP * LANES,
          [&](const auto& f)
              FM_INLINE_LAMBDA { for_seen_keys<P, vectors.end>(q0 - m.k0, begin, end, f); },
          [&](int64_t row) FM_INLINE_LAMBDA {
            if (m.far) fetch(dquery + (q0 + BLOCK) * rows + row * LANES, P::PANEL_ROWS * LANES);
          });
    });
  }
}

// keep, for BLOCK queries from q0 against BLOCK keys from k0.
template <class P>
static void block_dropout(const HeadDropout& dropout, const BackwardBlock<P>& m) {
  constexpr int BLOCKS = BLOCK / PHILOX_BLOCK + 1, ROWS = 2, VECTORS = BLOCKS * BLOCK_VECTORS;
  static_assert(BLOCK % PHILOX_BLOCK == PHILOX_BLOCK / 2 && BLOCK % ROWS == 0,
                "k0 begins a block of Philox or its second half");
  const auto keep = [&](auto offset) FM_INLINE_LAMBDA {
    constexpr int FIRST = decltype(offset)::value / VL;
    for (int64_t r = 0; r < BLOCK; r += ROWS) {
      vu words[ROWS * VECTORS];
      philox_words<BLOCKS, ROWS>(dropout.key, dropout.sample,
                                 dropout.row0 + static_cast<uint32_t>(m.q0 + r),
                                 static_cast<uint32_t>(m.k0 / PHILOX_BLOCK), words);
#pragma GCC unroll 64
      for (int v = 0; v < ROWS * (BLOCK / VL); ++v) {
        const int64_t row = r + v / (BLOCK / VL), i = v % (BLOCK / VL) * VL;
        const vu word = words[v / (BLOCK / VL) * VECTORS + FIRST + v % (BLOCK / VL)];
        store(reinterpret_cast<uint32_t*>(m.keep) + (i / LANES * BLOCK + row) * LANES + i % LANES,
              (vu)(word >= dropout.threshold));
      }
    }
  };
  m.k0 % PHILOX_BLOCK ? keep(Count<PHILOX_BLOCK / 2>()) : keep(Count<0>());
}

}  // namespace fm::FM_TARGET
