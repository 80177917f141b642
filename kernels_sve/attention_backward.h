// Backward pass: one task is every `groups`-th block of keys of one head; lanes are keys. Per block of keys and of
// queries, with delta = sum of dO O over d:
//
//   P = 2^(c Q K^T - c lse)    dS = P (dO V^T - delta)    dV += P^T dO    dK += dS^T Q    dQ += dS K
//
// (Dao et al., FlashAttention, 2022, algorithm 4; the factor 1 / sqrt(d) comes in where gradients leave). dK and dV
// belong to one task. dQ is summed per task into a partial of its own, and the partials in order at the end: their
// number follows from s alone, so results depend neither on threads nor on the heads and samples that a call holds.
// Included by attention.h.
#pragma once
#include "attention_block.h"

namespace fm::FM_TARGET {

template <class P, bool DROPOUT, class T>
static void backward_task(const AttentionShape& shape, const AttentionArgs& a, const BackwardHead<P>& head,
                          const T* qkv, T* dqkv, int64_t index, int64_t group, int64_t groups) {
  BackwardBlock<P> m = backward_memory<P>(shape.d_padded);
  const int64_t words = shape.d_padded / P::STEP, matrix = BLOCK * shape.d_padded;
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(a.d));
  m.c = LOG2_E * scale, m.keep_scale = keep_scale(a);
  const HeadDropout dropout(a, index);
  float* dquery = head.dquery + group * shape.s_padded * shape.d_padded;
  for (int64_t i = group * matrix; i < shape.s_padded * shape.d_padded; i += VL) store_aligned(dquery + i, vf{});
  for (m.k0 = group * BLOCK; m.k0 < a.s; m.k0 += groups * BLOCK) {
    for (int64_t g = 0; g < LANE_GROUPS; ++g) {
      pack_lanewise<P>(shape.qkv(qkv, index, 1), m.k0 + g * LANES, m.key + g * words * LANES, words);
      pack_lanewise<P>(shape.qkv(qkv, index, 2), m.k0 + g * LANES, m.value + g * words * LANES, words);
    }
    for (int64_t i = 0; i < 2 * matrix; i += VL) store_aligned(m.dkey + i, vf{});
    for (m.q0 = m.k0; m.q0 < a.s; m.q0 += BLOCK) {
      if (DROPOUT) block_dropout(dropout, m);
      block_scores<P, DROPOUT>(head, m, words);
      typename P::Word* prob = DROPOUT || P::STEP == 2 ? m.prob_words : reinterpret_cast<typename P::Word*>(m.prob);
      block_gradients(head, m, shape, prob, dquery);
    }
    for (int64_t r = 0; r < BLOCK && m.k0 + r < a.s; r += VL) {
      const int64_t from = r / LANES * LANES * shape.d_padded + r % LANES;
      unpack_rows(m.dkey + from, m.k0 + r, shape.qkv(dqkv, index, 1), broadcast(scale));
      unpack_rows(m.dvalue + from, m.k0 + r, shape.qkv(dqkv, index, 2), broadcast(m.keep_scale));
    }
  }
}

// Sums the partials of queries [first, first + LANES) in order and writes the rows.
template <class P, class T>
static void reduce_dquery(const AttentionShape& shape, const BackwardHead<P>& head, const Rows<T>& to, int64_t first,
                          int64_t groups) {
  const int64_t whole = shape.s_padded * shape.d_padded, matrix = LANES * shape.d_padded;
  const int64_t partials = min(groups, first / BLOCK + 1);
  float* sum = static_cast<float*>(scratch(0, matrix * sizeof(float)));
  for (int64_t i = 0; i < matrix; i += VL) {
    vf total = load_aligned(head.dquery + first * shape.d_padded + i);
    for (int64_t g = 1; g < partials; ++g) total += load_aligned(head.dquery + g * whole + first * shape.d_padded + i);
    store_aligned(sum + i, total);
  }
  const vf scale = broadcast(1.0f / __builtin_sqrtf(static_cast<float>(shape.d)));
  for (int64_t r = 0; r < LANES && first + r < shape.s; r += VL) unpack_rows(sum + r, first + r, to, scale);
}

// lse and delta of rows [begin, end).
template <class P, class T>
static void row_statistics(const BackwardHead<P>& head, const Rows<const T>& out, const Rows<const T>& dout,
                           const float* lse, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    head.lse[r] = r < out.s ? lse[r] * LOG2_E : __builtin_inff();
    vf sum = {};
    for_vectors(0, r < out.s ? out.d : 0, [&](int64_t i, int lanes) {
      sum = load_lanes(out.row(r) + i, lanes) * load_lanes(dout.row(r) + i, lanes) + sum;
    });
    head.delta[r] = hsum(sum);
  }
}

template <class P>
static BackwardHead<P> backward_head(const AttentionShape& shape, void* memory, int64_t index, int64_t groups) {
  using Word = typename P::Word;
  const int64_t matrix = shape.s_padded * shape.d_padded, operand = matrix / P::STEP;
  float* at = static_cast<float*>(memory) + index * (5 * operand + 2 * shape.s_padded + groups * matrix);
  Word* words = reinterpret_cast<Word*>(at);
  float* rows = at + 5 * operand;
  return {words, words + operand,       words + 2 * operand,      words + 3 * operand, words + 4 * operand,
          rows,  rows + shape.s_padded, rows + 2 * shape.s_padded};
}

template <class P, class T>
static void pack_backward(const AttentionShape& shape, const BackwardHead<P>& to, const T* qkv, const T* out,
                          const float* lse, const T* dout, int64_t index, int64_t row) {
  const int64_t words = shape.d_padded / P::STEP, panel = shape.s_padded / P::STEP * ATTENTION_MR, end = row + BLOCK;
  const Rows<const T> query = shape.qkv(qkv, index, 0), key = shape.qkv(qkv, index, 1),
                      grad = shape.context(dout, index);
  pack_crosswise<P>(query, row, end, to.query_rows, words);
  pack_crosswise<P>(grad, row, end, to.dout_rows, words);
  pack_columnwise<P>(query, row, end, to.query_columns, shape.d_padded, panel);
  pack_columnwise<P>(grad, row, end, to.dout_columns, shape.d_padded, panel);
  pack_columnwise<P>(key, row, end, to.keys, shape.d_padded, panel);
  row_statistics(to, shape.context(out, index), grad, lse + index * shape.s, row, end);
}

template <class P, class T>
static void backward_heads(const T* qkv, const T* out, const float* lse, const T* dout, T* dqkv, const AttentionArgs& a,
                           const AttentionShape& shape, int64_t first_head, int64_t heads) {
  const int64_t blocks = shape.s_padded / BLOCK, groups = shape.dquery_partials();
  const int64_t lane_groups = shape.s_padded / LANES;
  void* memory = scratch(1, heads * shape.packed_bytes(P::STEP));
  const auto head_of = [&](int64_t index) { return backward_head<P>(shape, memory, index, groups); };
  TaskQueue packing{heads * blocks}, keys{heads * groups}, queries{heads * lane_groups};
  parallel_run([&](int, int) {
    for (int64_t task; (task = packing.take()) < packing.tasks;) {
      pack_backward(shape, head_of(task / blocks), qkv, out, lse, dout, first_head + task / blocks,
                    task % blocks * BLOCK);
    }
    barrier();
    for (int64_t task; (task = keys.take()) < keys.tasks;) {
      const int64_t group = task % groups;
      const auto run = a.p > 0 ? &backward_task<P, true, T> : &backward_task<P, false, T>;
      run(shape, a, head_of(task / groups), qkv, dqkv, first_head + task / groups, group, groups);
    }
    barrier();
    for (int64_t task; (task = queries.take()) < queries.tasks;) {
      const int64_t head = first_head + task / lane_groups, first = task % lane_groups * LANES;
      if (first < a.s) reduce_dquery(shape, head_of(task / lane_groups), shape.qkv(dqkv, head, 0), first, groups);
    }
  });
}

template <class P, class T>
static void backward_of(const T* qkv, const T* out, const float* lse, const T* dout, T* dqkv, const AttentionArgs& a) {
  const AttentionShape shape(a);
  for_heads(shape, [&](int64_t first, int64_t count) {
    backward_heads<P>(qkv, out, lse, dout, dqkv, a, shape, first, count);
  });
}

}  // namespace fm::FM_TARGET
