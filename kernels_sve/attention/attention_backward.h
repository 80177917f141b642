// Backward pass: one task is every `partials`-th run of blocks of keys against one query head; lanes are keys. A run is one block,
// or several with short documents or a short window, so that few tasks add to a row of dQ. Per block of keys and of queries, with
// delta = sum of dO O over d:
//
//   P = 2^(c Q K^T - c lse)    dS = P (dO V^T - delta)    dV += P^T dO    dK += dS^T Q    dQ += dS K
//
// (Dao et al., FlashAttention, 2022, algorithm 4; the factor 1 / score_divisor comes in where gradients leave). dK and dV
// belong to one task, and where query heads share a key and a value, their parts are summed in the order of heads at the end.
// So is dQ, which every task sums into a partial of its own: runs follow from the sample alone, so results depend neither on
// threads nor on the groups and samples that a call holds.
// Included by attention.h.
#pragma once
#include "attention/attention_block.h"

namespace fm::FM_TARGET {

// A call, and the heads that are worked on at once: `count` from `first` on, whole groups or a part of one. Members count
// heads and groups from the first of these.
template <class P, class T>
struct BackwardRun {
  const AttentionShape& shape;
  const AttentionArgs& args;
  const T *qkv, *kv, *out, *dout;  // kv: qkv, or the keys of a part
  const float* lse;
  void *dqkv, *dkv;  // of T and one tensor; in a part FP32, to which the gradients are added
  float* memory;
  int64_t* runs;  // of each sample: blocks of keys in a run
  int64_t first, count;

  float scale() const { return 1.0f / args.score_divisor; }
  int64_t groups() const { return max(1, count / shape.share); }
  // Packed keys of a group, then its sums of dK and dV.
  float* group_memory(int64_t group) const {
    return memory + shape.heads_at_once * shape.head_floats(P::STEP) +
           group * shape.group_floats(P::STEP);
  }
  BackwardHead<P> head(int64_t local) const {
    const int64_t query = shape.query_matrix() / P::STEP, dout = shape.context_matrix() / P::STEP,
                  q0 = shape.first_query, k0 = shape.first_key;
    float *const at = memory + local * shape.head_floats(P::STEP),
                 *const columns = at + query + dout, *const rows = columns + query + dout;
    float *const dquery = rows + 2 * shape.queries_padded, *const dkey =
                                                               dquery + shape.dquery_partials() *
                                                                            shape.query_matrix();
    const auto words = [](float* floats) { return reinterpret_cast<typename P::Word*>(floats); };
    const int64_t columnwise = q0 / P::STEP * P::PANEL_ROWS;
    return {words(at) - q0 * shape.key_columns / P::STEP,
            words(at + query) - q0 * shape.value_columns / P::STEP,
            words(columns) - columnwise,
            words(columns + query) - columnwise,
            words(group_memory(local / shape.share)) - k0 / P::STEP * P::PANEL_ROWS,
            rows - q0,
            rows + shape.queries_padded - q0,
            dquery - q0 * shape.key_columns,
            dkey - k0 * shape.key_columns,
            dkey + shape.key_matrix() - k0 * shape.value_columns};
  }
};

// f(dQKV, dKV) with the type of the gradients.
template <class P, class T, class F>
FM_INLINE void with_gradients(const BackwardRun<P, T>& run, const F& f) {
  run.shape.part ? f(static_cast<float*>(run.dqkv), static_cast<float*>(run.dkv))
                 : f(static_cast<T*>(run.dqkv), static_cast<T*>(run.dkv));
}

// Packs the keys and values of the block that begins at m.k0; dK and dV of a head that shares them go to its own memory.
template <class P, class T>
static void begin_keys(const BackwardRun<P, T>& run, const BackwardHead<P>& head,
                       BackwardBlock<P>& m, int64_t group) {
  const AttentionShape& shape = run.shape;
  const auto pack = [&](int which, typename P::Word* to, int64_t words) {
    for (int64_t g = 0; g < LANE_GROUPS; ++g) {
      pack_lanewise<P>(shape.key_value(run.kv, group, which), m.k0 + g * LANES,
                       to + g * words * LANES, words);
    }
  };
  pack(0, m.key, shape.key_columns / P::STEP), pack(1, m.value, shape.value_columns / P::STEP);
  if (shape.share > 1) {
    m.dkey = head.dkey + m.k0 * shape.key_columns;
    m.dvalue = head.dvalue + m.k0 * shape.value_columns;
  }
}

// Rows [first, first + LANES) of `to` = factor * sum, or += in a part.
template <class T>
static void write_rows(const float* sum, const Rows<T>& to, int64_t first, float factor,
                       bool part) {
  for (int64_t r = 0; r < LANES && first + r < to.s; r += VL) {
    part ? unpack_rows<true>(sum + r, first + r, to, broadcast(factor))
         : unpack_rows(sum + r, first + r, to, broadcast(factor));
  }
}

// Blocks of keys in a run of a sample: four times what a query sees, or all of a task's, where that leaves a query the keys of two
// tasks at most. A longer sequence with the same documents has the same runs.
static int64_t blocks_of_run(const AttentionShape& shape, const Documents& documents) {
  const int64_t blocks = shape.keys_padded / BLOCK,
                most = (blocks + shape.dquery_partials() - 1) / shape.dquery_partials();
  const int64_t seen = round_up(min(shape.window, documents.longest()), BLOCK) / BLOCK;
  return seen <= most ? min(4 * seen, most) : 1;
}

// The block of keys that a task takes after `block`.
FM_INLINE int64_t next_block(const AttentionShape& shape, int64_t run, int64_t block) {
  return block + 1 + ((block + 1) % run ? 0 : (shape.dquery_partials() - 1) * run);
}

template <class P, bool DROPOUT, class T>
static void backward_task(const BackwardRun<P, T>& run, int64_t local, int64_t partial) {
  const AttentionShape& shape = run.shape;
  const int64_t key_columns = shape.key_columns, value_columns = shape.value_columns;
  const int64_t index = run.first + local, group = index / shape.share;
  const BackwardHead<P> head = run.head(local);
  BackwardBlock<P> m = backward_memory<P>(shape, Documents(run.args, index / shape.heads));
  m.c = LOG2_E * run.scale(), m.keep_scale = keep_scale(run.args), m.window = shape.window;
  m.queries_end = shape.queries.end, m.keys_end = shape.keys_end();
  m.far = 4 * shape.queries_padded >
          LONG_SEQUENCE;  // five matrices of queries and sums, where forward reads two of keys
  const HeadDropout dropout(run.args, index);
  float* dquery = head.dquery + partial * shape.query_matrix();
  const int64_t blocks = run.runs[index / shape.heads];
  const int64_t last_query = shape.first_query + shape.queries_padded;
  int64_t written = 0;  // rows of dquery
  for (int64_t block = partial * blocks; (m.k0 = shape.first_key + block * BLOCK) < shape.keys.end;
       block = next_block(shape, blocks, block)) {
    for (int64_t g = 0; g < LANE_GROUPS; ++g) {
      const int64_t key = m.k0 + (g + 1) * LANES - 1;
      m.seen_to[g] = min(key + shape.window, m.documents.end(key, last_query));
    }
    const int64_t end =
        min(last_query, round_up(m.seen_to[LANE_GROUPS - 1], BLOCK));  // of its queries
    begin_keys(run, head, m, group);
    m.first_q0 = max(m.k0, shape.first_query);
    if (m.first_q0 >= end) {  // no query of this part sees them
      __builtin_memset(m.dkey, 0, static_cast<size_t>(BLOCK * key_columns) * sizeof(float));
      __builtin_memset(m.dvalue, 0, static_cast<size_t>(BLOCK * value_columns) * sizeof(float));
    }
    for (m.q0 = m.first_q0; m.q0 < min(shape.queries.end, end); m.q0 += BLOCK) {
      if (DROPOUT) block_dropout(dropout, m);
      block_scores<P, DROPOUT>(head, m, key_columns / P::STEP, value_columns / P::STEP);
      typename P::Word* prob =
          DROPOUT || P::STEP == 2 ? m.prob_words : reinterpret_cast<typename P::Word*>(m.prob);
      block_gradients(head, m, shape, prob, dquery, m.q0 >= written);
    }
    written = end;
    for (int64_t r = 0; shape.share == 1 && r < BLOCK; r += LANES) {
      with_gradients(run, [&](auto*, auto* dkv) {
        write_rows(m.dkey + r * key_columns, shape.key_value(dkv, group, 0), m.k0 + r, run.scale(),
                   shape.part);
        write_rows(m.dvalue + r * value_columns, shape.key_value(dkv, group, 1), m.k0 + r,
                   m.keep_scale, shape.part);
      });
    }
  }
}

// sum = `count` parts, part(i) for i < count, in order; onto what sum holds if `goes_on`.
template <class F>
FM_INLINE void add_parts(float* sum, const F& part, int64_t count, int64_t floats, bool goes_on) {
  for (int64_t i = 0; i < floats; i += VL) {
    vf total = load_aligned((goes_on ? sum : part(0)) + i);
    for (int64_t p = goes_on ? 0 : 1; p < count; ++p) total += load_aligned(part(p) + i);
    store_aligned(sum + i, total);
  }
}

// Rows [row, row + LANES) of dQ: the partials of the blocks of keys that these queries see.
template <class P, class T>
static void reduce_dquery(const BackwardRun<P, T>& run, int64_t local, int64_t row) {
  const AttentionShape& shape = run.shape;
  const int64_t partials = shape.dquery_partials(), floats = LANES * shape.key_columns;
  const Documents documents(run.args, (run.first + local) / shape.heads);
  const int64_t query = row / BLOCK * BLOCK;  // the first one whose blocks of keys these rows have
  const int64_t blocks = run.runs[(run.first + local) / shape.heads];
  const int64_t last = (min(query, shape.keys.end - 1) - shape.first_key) / BLOCK;
  const int64_t first =
      (max(max(documents.start(query), query + 1 - shape.window), shape.first_key) -
       shape.first_key) /
      BLOCK / blocks;
  if (query < shape.first_key || last / blocks < first) return;
  float *sum = static_cast<float*>(scratch(0, floats * sizeof(float))),
        *dquery = run.head(local).dquery;
  const auto part = [&](int64_t i) {
    return dquery + (first + i) % partials * shape.query_matrix() + row * shape.key_columns;
  };
  add_parts(sum, part, min(partials, last / blocks - first + 1), floats, false);
  with_gradients(run, [&](auto* dqkv, auto*) {
    write_rows(sum, shape.query(dqkv, run.first + local), row, run.scale(), shape.part);
  });
}

// Rows [row, row + LANES) of dK (part 0) or dV (1): the group's heads at hand, after those of it that came before.
template <class P, class T>
static void reduce_dkey_dvalue(const BackwardRun<P, T>& run, int64_t group, int part, int64_t row) {
  const AttentionShape& shape = run.shape;
  const int64_t columns = part == 0 ? shape.key_columns : shape.value_columns, at = row * columns;
  const int64_t heads = run.count / run.groups(), end = run.first + (group + 1) * heads;
  const BackwardHead<P> head = run.head(group * heads);
  float* sum = run.group_memory(group) + shape.key_matrix() / P::STEP + part * shape.key_matrix() +
               at - shape.first_key * columns;
  const float* first = (part == 0 ? head.dkey : head.dvalue) + at;
  const auto of_head = [&](int64_t i) { return first + i * shape.head_floats(P::STEP); };
  add_parts(sum, of_head, heads, LANES * columns, run.first % shape.share != 0);
  if (end % shape.share) return;
  with_gradients(run, [&](auto*, auto* dkv) {
    write_rows(sum, shape.key_value(dkv, end / shape.share - 1, part), row,
               part == 0 ? run.scale() : keep_scale(run.args), shape.part);
  });
}

// lse and delta of rows [begin, end).
template <class P, class T>
static void row_statistics(const BackwardHead<P>& head, const Rows<const T>& out,
                           const Rows<const T>& dout, const float* lse, int64_t begin,
                           int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t i = 0; r + VL < out.s && i < out.d; i += VL) prefetch(out.row(r + VL) + i);
    head.lse[r] = out.has(r) ? lse[r] * LOG2_E : __builtin_inff();
    vf sum = {};
    for_vectors(0, out.has(r) ? out.d : 0, [&](int64_t i, int lanes) {
      sum = load_lanes(out.row(r) + i, lanes) * load_lanes(dout.row(r) + i, lanes) + sum;
    });
    head.delta[r] = hsum(sum);
  }
}

// Block `block` of the queries of a head, and of its group's keys if it is the group's first.
template <class P, class T>
static void pack_backward(const BackwardRun<P, T>& run, int64_t local, int64_t block) {
  const AttentionShape& shape = run.shape;
  const BackwardHead<P> to = run.head(local);
  const int64_t key_columns = shape.key_columns, value_columns = shape.value_columns,
                panel = shape.queries_padded / P::STEP * P::PANEL_ROWS;
  const int64_t index = run.first + local, key = shape.first_key + block * BLOCK;
  if (index % shape.share == 0 && key < shape.keys.end) {
    pack_columnwise<P>(shape.key_value(run.kv, index / shape.share, 0), key, key + BLOCK, to.keys,
                       key_columns, shape.keys_padded / P::STEP * P::PANEL_ROWS);
  }
  const int64_t row = shape.first_query + block * BLOCK, end = row + BLOCK;
  if (row >= shape.queries.end) return;
  const Rows<const T> query = shape.query(run.qkv, index), grad = shape.context(run.dout, index);
  pack_crosswise<P>(query, row, end, to.query_rows, key_columns / P::STEP);
  pack_crosswise<P>(grad, row, end, to.dout_rows, value_columns / P::STEP);
  pack_columnwise<P>(query, row, end, to.query_columns, key_columns, panel);
  pack_columnwise<P>(grad, row, end, to.dout_columns, value_columns, panel);
  row_statistics(to, shape.context(run.out, index), grad, shape.statistics(run.lse, index), row,
                 end);
}

template <class P, class T>
static void backward_run(const BackwardRun<P, T>& run) {
  const AttentionShape& shape = run.shape;
  const int64_t blocks = max(shape.queries_padded, shape.keys_padded) / BLOCK,
                partials = shape.dquery_partials();
  const int64_t query_rows = (shape.queries.end - shape.first_query + LANES - 1) / LANES;
  const int64_t rows = (shape.keys.end - shape.first_key + LANES - 1) / LANES;
  TaskQueue packing{run.count * blocks}, keys{run.count * partials},
      queries{run.count * query_rows};
  TaskQueue sums{shape.share > 1 ? run.groups() * 2 * rows : 0};
  parallel_run([&](int, int) {
    for (int64_t task; (task = packing.take()) < packing.tasks;) {
      pack_backward(run, task % run.count,
                    task / run.count);  // heads are next to each other in a row
    }
    barrier();
    tiles_begin();
    const auto work = run.args.p > 0 ? &backward_task<P, true, T> : &backward_task<P, false, T>;
    for (int64_t task; (task = keys.take()) < keys.tasks;)
      work(run, task / partials, task % partials);
    tiles_end();
    barrier();
    for (int64_t task; (task = queries.take()) < queries.tasks;) {
      reduce_dquery(run, task % run.count, shape.first_query + task / run.count * LANES);
    }
    for (int64_t task; (task = sums.take()) < sums.tasks;) {
      reduce_dkey_dvalue(run, task / rows / 2, static_cast<int>(task / rows % 2),
                         shape.first_key + task % rows * LANES);
    }
  });
}

template <class P, class T>
static void backward_of(const T* qkv, const T* kv, const T* out, const float* lse, const T* dout,
                        void* dqkv, void* dkv, const AttentionArgs& a) {
  const AttentionShape shape(a);
  BackwardRun<P, T> run{shape, a, qkv, kv, out, dout, lse, dqkv, dkv, nullptr, nullptr, 0, 0};
  run.runs = static_cast<int64_t*>(scratch(2, static_cast<size_t>(a.b) * sizeof(int64_t)));
  for (int64_t sample = 0; sample < a.b; ++sample)
    run.runs[sample] = blocks_of_run(shape, Documents(a, sample));
  run.memory = static_cast<float*>(scratch(1, shape.packed_bytes(P::STEP)));
  for (; run.first < shape.all_heads(); run.first += run.count) {
    const int64_t left = shape.share > shape.heads_at_once ? shape.share - run.first % shape.share
                                                           : shape.all_heads() - run.first;
    run.count = min(shape.heads_at_once, left);
    backward_run(run);
  }
}

}  // namespace fm::FM_TARGET
