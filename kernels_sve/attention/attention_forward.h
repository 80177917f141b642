// Forward pass: blocks of LANES queries of one head, lanes are queries, so a softmax needs no operation across lanes. A task is one
// block, or QUERY_BLOCKS of a long sequence, which take turns so that keys from memory serve all of them.
//
//   for blocks of keys from the window's first up to the diagonal:
//     S = K Q^T (keys, LANES)    P = 2^(c S - c m)    O^T = O^T 2^(c m_old - c m) + V^T P
//
// with c = log2(e) / score_divisor, m the running maximum of a query and l the running sum of P (online softmax: Milakov and
// Gimelshein, 2018; tiling: Dao et al., FlashAttention, 2022). Included by attention.h.
#pragma once
#include "attention/attention_shape.h"

namespace fm::FM_TARGET {

template <class P>
struct PackedKeysValues {
  typename P::Word *keys, *values;
  int64_t words, panel;  // words of a row of keys; words from one panel of values to the next
  bool far;  // too many for a cache: those of the next round are fetched while this one is computed
};

// A block's state; the arrays are the thread's scratch.
template <class P>
struct QueryBlock {
  typename P::Word *query, *prob;  // (words of a key, LANES), (KEY_BLOCK / STEP, LANES)
  float *score, *out;              // (KEY_BLOCK, LANES), (value_columns, LANES)
  vf maximum[ATTENTION_NV], sum[ATTENTION_NV];
  vi position[ATTENTION_NV], start[ATTENTION_NV];  // start: of the query's document
  int64_t first, end, next_key, window, last_start, keys_end;
};

// Scores of keys [k0, k0 + MR) into score rows, -inf where the query does not see the key; raises the maximum.
template <class P, class V>
FM_INLINE void score_tile(const PackedKeysValues<P>& head, QueryBlock<P>& q, int64_t k0,
                          float* score, V vectors) {
  Tile t = product<P>(score, head.keys, k0, q.query, head.words, vectors);
  if (k0 + ATTENTION_MR > q.first + V::first * VL || k0 + q.window < q.first + LANES) {
    for_tile(
        [&](int i, int v) {
          const vi distance = q.position[v] - static_cast<int32_t>(k0 + i);
          t.v[i][v] = hidden(distance, q.window) ? broadcast(-__builtin_inff()) : t.v[i][v];
        },
        vectors);
  }
  if (k0 < q.last_start) {
    for_tile(
        [&](int i, int v) {
          t.v[i][v] =
              q.start[v] > static_cast<int32_t>(k0 + i) ? broadcast(-__builtin_inff()) : t.v[i][v];
        },
        vectors);
  }
  if (k0 + ATTENTION_MR > q.keys_end) {
    for_tile(
        [&](int i, int v) {
          t.v[i][v] = k0 + i < q.keys_end ? t.v[i][v] : broadcast(-__builtin_inff());
        },
        vectors);
  }
  store_tile(score, t, vectors);
  for_tile([&](int i, int v) { q.maximum[v] = fast_max(q.maximum[v], t.v[i][v]); }, vectors);
}

// score -> P in place, for rows [begin, end), or at once to `prob` as operand words; adds even and odd rows to sums of their own.
template <class P, class V>
FM_INLINE void exponentiate(const QueryBlock<P>& q, int64_t begin, int64_t end, float c,
                            vf (&sum)[2][ATTENTION_NV], [[maybe_unused]] bool to_words, V) {
  constexpr int N = V::end - V::first;
  vf highest[N], total[2 * N];  // in registers
#pragma GCC unroll 6
  for (int i = 0; i < 2 * N; ++i)
    highest[i % N] = q.maximum[V::first + i % N] * c, total[i] = sum[i / N][V::first + i % N];
  for (int64_t r = begin; r < end; r += 2) {
    vf x[2 * N];
#pragma GCC unroll 6
    for (int i = 0; i < 2 * N; ++i) {
      const int v = V::first + i % N;
      x[i] = load_aligned(q.score + (r + i / N) * LANES + v * VL) * c - highest[i % N];
    }
    exp2_each(x);
#pragma GCC unroll 6
    for (int i = 0; i < 2 * N; ++i) total[i] += x[i];
#ifdef FM_HAS_BF16_PAIRS
    if constexpr (P::STEP == 2) {
#pragma GCC unroll 3
      for (int v = 0; to_words && v < N; ++v)
        store(q.prob + r / 2 * LANES + (V::first + v) * VL, to_pairs(x[v], x[N + v]));
      if (to_words) continue;
    }
#endif
#pragma GCC unroll 6
    for (int i = 0; i < 2 * N; ++i)
      store_aligned(q.score + (r + i / N) * LANES + (V::first + i % N) * VL, x[i]);
  }
#pragma GCC unroll 6
  for (int i = 0; i < 2 * N; ++i) sum[i / N][V::first + i % N] = total[i];
}

// Zeroes the dropped of P: lanes are rows of the mask here, so one Philox call gives keys 16 apart.
template <class P>
static void drop_scores(const HeadDropout& dropout, QueryBlock<P>& q, int64_t k0, int64_t rows) {
  const auto next = [](int64_t c) {
    return c + (c % PHILOX_BLOCK == PHILOX_CALLS - 1 ? PHILOX_BLOCK - PHILOX_CALLS + 1 : 1);
  };
  for (int64_t column = k0 / PHILOX_BLOCK * PHILOX_BLOCK; column < k0 + rows;
       column = next(column)) {
    const int64_t r = column - k0;  // below 0 where a window begins inside a block
    const uint32_t call =
        static_cast<uint32_t>(column / PHILOX_BLOCK * PHILOX_CALLS + column % PHILOX_BLOCK);
    const auto drop = [&](auto count, int first) FM_INLINE_LAMBDA {  // vectors [first, first + N)
      constexpr int N = decltype(count)::value;
      vu words[N][4];
#pragma GCC unroll 3
      for (int v = 0; v < N; ++v) {
        words[v][0] = broadcast(call);
        words[v][1] = (vu)q.position[first + v] + dropout.row0;
        words[v][2] = broadcast(static_cast<uint32_t>(dropout.sample));
        words[v][3] = broadcast(static_cast<uint32_t>(dropout.sample >> 32));
      }
      philox_sets<N>(words, dropout.key);
#pragma GCC unroll 4
      for (int w = 0; w < 4; ++w) {
        const int64_t row = r + w * PHILOX_CALLS;
        if (row < 0 || row >= rows) continue;
#pragma GCC unroll 3
        for (int v = 0; v < N; ++v) {
          float* p = q.score + row * LANES + (first + v) * VL;
          store_aligned(p, words[v][w] >= dropout.threshold ? load_aligned(p) : vf{});
        }
      }
    };
    if (Tuning::PHILOX_SETS >= ATTENTION_NV && column < q.first + VL) {
      drop(Count<ATTENTION_NV>(), 0);
      continue;
    }
    for (int v = 0; v < ATTENTION_NV; ++v) {
      if (column < q.first + (v + 1) * VL)
        drop(Count<1>(), v);  // else hidden from all queries of this vector
    }
  }
}

#ifdef FM_HAS_BF16_PAIRS
FM_INLINE void make_pairs(const float* rows, uint32_t* pairs, int64_t count) {
  for (int64_t r = 0; r < count; r += 2) {
#pragma GCC unroll 3
    for (int v = 0; v < ATTENTION_NV; ++v) {
      const float* row = rows + r * LANES + v * VL;
      store(pairs + r / 2 * LANES + v * VL, to_pairs(load_aligned(row), load_aligned(row + LANES)));
    }
  }
}
#endif

// One round of the online softmax over keys [k0, k0 + rows), for the first END vectors of queries.
template <class P, int END>
static void attend(const PackedKeysValues<P>& head, QueryBlock<P>& q, int64_t k0, int64_t rows,
                   int64_t value_columns, float c, const HeadDropout* dropout) {
  const auto seen_keys = [&](const auto& f)
                             FM_INLINE_LAMBDA { for_seen_keys<P, END>(q.first - k0, 0, rows, f); };
  vf alpha[END], sum[2][ATTENTION_NV] = {};
#pragma GCC unroll 3
  for (int v = 0; v < END; ++v) alpha[v] = q.maximum[v];
  seen_keys([&](auto vectors, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r += ATTENTION_MR) {
      if (head.far) fetch(head.keys + (k0 + KEY_BLOCK + r) * head.words, ATTENTION_MR * head.words);
      score_tile(head, q, k0 + r, q.score + r * LANES, vectors);
    }
  });
#pragma GCC unroll 3
  for (int v = 0; v < END; ++v) alpha[v] = (alpha[v] - q.maximum[v]) * c;
  exp2_each(alpha);
#pragma GCC unroll 3
  for (int v = 0; v < END; ++v) q.sum[v] *= alpha[v];
  seen_keys([&](auto vectors, int64_t begin, int64_t end) {
    exponentiate(q, begin, end, c, sum, !dropout, vectors);
  });
#pragma GCC unroll 3
  for (int v = 0; v < END; ++v) q.sum[v] += sum[0][v] + sum[1][v];
  if (dropout) drop_scores(*dropout, q, k0, rows);
#ifdef FM_HAS_BF16_PAIRS
  if constexpr (P::STEP == 2) {
    if (dropout) make_pairs(q.score, q.prob, rows);
  }
#endif
  const typename P::Word* values = head.values + k0 / P::STEP * P::PANEL_ROWS;
  for (int64_t row = 0; row < value_columns;
       row += ATTENTION_MR, values += P::TILES ? 0 : head.panel) {
    if (!P::TILES && head.far)
      fetch(values + KEY_BLOCK / P::STEP * P::PANEL_ROWS, KEY_BLOCK / P::STEP * P::PANEL_ROWS);
    Tile t = load_tile(q.out + row * LANES);
    for_tile([&](int i, int v) { t.v[i][v] *= alpha[v]; }, Vectors<0, END>());
    if constexpr (!P::TILES) {
      seen_keys([&](auto vectors, int64_t begin, int64_t end)
                    FM_INLINE_LAMBDA { multiply_rows<P>(t, values, q.prob, begin, end, vectors); });
    }
    store_tile(q.out + row * LANES, t, Vectors<0, END>());
  }
  if constexpr (P::TILES)
    accumulate<P>(q.out, false, value_columns, values, head.panel, q.prob, seen_keys,
                  [](int64_t) {});
}

// to[row + lane] = x of each lane, for those in `rows`.
FM_INLINE void store_rows(float* to, int64_t row, const Positions& rows, vf x) {
  if (row >= rows.begin) return store_lanes(to + row, x, static_cast<int>(min(VL, rows.end - row)));
  float lanes[VL];
  store(lanes, x);
  for (int64_t r = rows.begin; r < min(row + VL, rows.end); ++r) to[r] = lanes[r - row];
}

// Packs queries [first, end) of one head, at most LANES, and begins their softmax. score: of all blocks; memory: query and out.
template <class P, class T>
static QueryBlock<P> begin_queries(const AttentionShape& shape, const Documents& documents,
                                   const Rows<const T>& query, int64_t first, int64_t end,
                                   float* score, float* memory) {
  using Word = typename P::Word;
  QueryBlock<P> q;
  q.query = reinterpret_cast<Word*>(memory), q.out = memory + shape.key_columns * LANES,
  q.score = score;
  q.prob = reinterpret_cast<Word*>(P::STEP == 1 ? score : score + KEY_BLOCK * LANES);
  q.first = first, q.end = end, q.window = shape.window,
  q.last_start = documents.seen_from(end - 1), q.keys_end = shape.keys_end();
  pack_lanewise<P>(query, first, q.query, shape.key_columns / P::STEP);
  for (int64_t i = 0; i < shape.value_columns * LANES; i += VL) store_aligned(q.out + i, vf{});
  // With documents, and in a part, a query may see no key in the first rounds: a finite maximum keeps these from -inf - -inf.
  const bool may_see_none = documents.starts || shape.part;
  const float lowest = may_see_none ? -1e30f : -__builtin_inff();
  for (int v = 0; v < ATTENTION_NV; ++v) {
    q.maximum[v] = broadcast(lowest), q.sum[v] = vf{};
    q.position[v] = (vi)lane_index() + static_cast<int32_t>(first + v * VL);
    if (!may_see_none) continue;  // then no tile reads them
    uint32_t starts[VL];
    for (int lane = 0; lane < VL; ++lane)
      starts[lane] = static_cast<uint32_t>(documents.seen_from(first + v * VL + lane));
    q.start[v] = (vi)load(starts);
  }
  const int64_t query0 = max(first, shape.queries.begin);
  q.next_key =
      max(documents.seen_from(query0), query0 + 1 - shape.window) / ATTENTION_UNIT * ATTENTION_UNIT;
  return q;
}

// The next round of the softmax of these queries; false where there was none.
template <class P>
static bool next_round(const AttentionShape& shape, const PackedKeysValues<P>& head,
                       QueryBlock<P>& q, float c, const HeadDropout* dropout) {
  const int64_t k0 = q.next_key;
  bool more = false;
  with_vectors<P>((q.end - q.first + VL - 1) / VL, [&](auto vectors) {
    const int64_t last = min(q.first + vectors.end * VL,
                             round_up(shape.keys.end, shape.part ? ATTENTION_UNIT : BLOCK));
    if (k0 >= last) return;
    attend<P, vectors.end>(head, q, k0, min(KEY_BLOCK, last - k0), shape.value_columns, c, dropout);
    more = true;
  });
  q.next_key += KEY_BLOCK;
  return more;
}

// The output of the queries of a block and their log-sum-exp.
template <class P, class T>
static void end_queries(const AttentionShape& shape, const AttentionArgs& a, const QueryBlock<P>& q,
                        const Rows<T>& out, float* lse, float c) {
  for (int v = 0; v < ATTENTION_NV && q.first + v * VL < q.end; ++v) {
    const int64_t row = q.first + v * VL;
    const vi none = q.sum[v] == vf{};  // of a part's keys
    unpack_rows(q.out + v * VL, row, out, none ? vf{} : keep_scale(a) * reciprocal(q.sum[v]));
    const vf log_sum =
        q.sum[v] < __builtin_inff() ? q.maximum[v] * c * LN_2 + log(q.sum[v]) : q.sum[v];
    store_rows(lse, row, shape.queries, none ? broadcast(-__builtin_inff()) : log_sum);
  }
}

// Where blocks of queries may begin: the positions [begin, end) * step.
struct Places {
  int64_t begin, end, step;
};

// The blocks of a head that begin at `places`, the longest first, QUERY_BLOCKS at a time.
template <class P, class T>
static void forward_task(const AttentionShape& shape, const AttentionArgs& a,
                         const PackedKeysValues<P>& head, int64_t index, const Rows<const T>& query,
                         const Rows<T>& out, float* lse, const Places& places) {
  const float c = LOG2_E / a.score_divisor;
  const int64_t scores = 2 * KEY_BLOCK * LANES,
                matrices = (shape.key_columns + shape.value_columns) * LANES;
  float* memory = static_cast<float*>(
      scratch(0, static_cast<size_t>(scores + QUERY_BLOCKS * matrices) * sizeof(float)));
  const Documents documents(a, index / a.heads);
  const HeadDropout dropout(a, index);
  QueryBlock<P> blocks[QUERY_BLOCKS];
  for (int64_t place = places.end; place > places.begin;) {
    int64_t count = 0;
    while (place > places.begin && count < QUERY_BLOCKS) {
      const int64_t first = --place * places.step, end = documents.task_end<P::EDGE>(first),
                    last = min(end, shape.queries.end);
      if (end == first || last <= shape.queries.begin) continue;
      blocks[count] = begin_queries<P>(shape, documents, query, first, last, memory,
                                       memory + scores + count * matrices);
      ++count;
    }
    for (bool more = true; more;) {
      more = false;
      for (int64_t i = 0; i < count; ++i)
        more |= next_round(shape, head, blocks[i], c, a.p > 0 ? &dropout : nullptr);
    }
    for (int64_t i = 0; i < count; ++i) end_queries(shape, a, blocks[i], out, lse, c);
  }
}

// Hands out task numbers [0, tasks) to whichever thread is free.
struct TaskQueue {
  int64_t tasks, next = 0;
  int64_t take() { return __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED); }
};

// Groups [first_group, first_group + groups), all query heads of them. kv: qkv, or the tensor that holds the keys of a part.
template <class P, class T>
static void forward_groups(const T* qkv, const T* kv, T* out, float* lse, const AttentionArgs& a,
                           const AttentionShape& shape, typename P::Word* packed,
                           int64_t first_group, int64_t groups) {
  const int64_t words = shape.key_columns / P::STEP;
  const auto group_of = [&](int64_t group) {
    const int64_t matrices = (shape.key_matrix() + shape.value_matrix()) / P::STEP;
    typename P::Word *keys = packed + group * matrices, *values = keys + shape.keys_padded * words;
    return PackedKeysValues<P>{
        keys - shape.first_key * words, values - shape.first_key / P::STEP * P::PANEL_ROWS, words,
        shape.keys_padded / P::STEP * P::PANEL_ROWS, shape.keys_padded > LONG_SEQUENCE};
  };
  const int64_t blocks = shape.keys_padded / BLOCK, step = a.starts ? P::EDGE : LANES;
  const int64_t place0 = max(0, shape.queries.begin - LANES + step) /
                         step;  // of the first block that may end in the queries
  const int64_t places = (shape.queries.end + step - 1) / step - place0;
  // Places of a task: of several blocks in a long sequence, as long as each thread has four tasks.
  const int64_t blocks_each = groups * shape.share * places * step / LANES / (4 * num_threads());
  const int64_t together =
      LANES / step * (shape.keys_padded > LONG_SEQUENCE ? clamp(blocks_each, 1, QUERY_BLOCKS) : 1);
  const int64_t tasks = (places + together - 1) / together;
  TaskQueue packing{groups * blocks}, queries{groups * shape.share * tasks};
  parallel_run([&](int, int) {
    for (int64_t task; (task = packing.take()) < packing.tasks;) {
      const int64_t group = first_group + task % groups,
                    row = shape.first_key + task / groups * BLOCK;  // heads lie side by side
      const PackedKeysValues<P> to = group_of(task % groups);
      pack_crosswise<P>(shape.key_value(kv, group, 0), row, row + BLOCK, to.keys, words);
      pack_columnwise<P>(shape.key_value(kv, group, 1), row, row + BLOCK, to.values,
                         shape.value_columns, to.panel);
    }
    barrier();
    tiles_begin();
    for (int64_t task; (task = queries.take()) < queries.tasks;) {
      const int64_t head = first_group * shape.share + task / tasks,
                    end = places - task % tasks * together;  // the longest first
      forward_task<P>(shape, a, group_of(task / tasks / shape.share), head, shape.query(qkv, head),
                      shape.context(out, head), shape.statistics(lse, head),
                      Places{place0 + max(0, end - together), place0 + end, step});
    }
    tiles_end();
  });
}

template <class P, class T>
static void forward_of(const T* qkv, const T* kv, T* out, float* lse, const AttentionArgs& a) {
  const AttentionShape shape(a);
  const int64_t groups = shape.all_heads() / shape.share;
  auto* packed = static_cast<typename P::Word*>(scratch(1, shape.packed_bytes(P::STEP)));
  for (int64_t first = 0; first < groups; first += shape.groups_at_once) {
    forward_groups<P>(qkv, kv, out, lse, a, shape, packed, first,
                      min(shape.groups_at_once, groups - first));
  }
}

}  // namespace fm::FM_TARGET
