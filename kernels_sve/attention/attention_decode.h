// Attention of one new token of each sample against the keys and values that are kept of the earlier ones: generation.
//
//   qkv (rows, heads key_size + groups (key_size + value_size))    out (rows, heads value_size)
//   keys (samples, groups, slots, key_size)    values (samples, groups, slots, value_size), or the beginnings of keys
//
// Row r is position positions[r] of sample samples[r]; its key and value are kept in slot position mod slots, and the last
// `slots` positions are attended to, so a window is a short cache. With absorbed projections (multi-head latent attention,
// DeepSeek-V2, arXiv:2405.04434) a value is the beginning of its key, is kept once, and qkv has no values. Memory bounds this, or
// arithmetic where many heads share such keys (attention_latents.h). A task reads some slots of one group once for all query heads
// of it, and leaves a partial softmax (Dao et al., Flash-Decoding, 2023), which are put together in order. How slots are cut
// follows from their number alone, so results have the same bits for any number of threads.
// Reference: attention_reference.cc. Tested by tests/kernels/test_attention_decode.py. Included by attention.h.
#pragma once
#include "attention/attention_latents.h"

namespace fm::FM_TARGET {

static_assert(DECODE_SLOTS % VL == 0, "scores fill vectors");

// Query heads that are multiplied at once by what is loaded of a key or a value: as many sums as a vector has lanes.
constexpr int DECODE_HEADS = VL / 4;

// f(Count<N>(), head) for the N heads from `head` on, the last ones one at a time.
template <class F>
FM_INLINE void for_decode_heads(int64_t heads, const F& f) {
  int64_t head = 0;
  for (; head + DECODE_HEADS <= heads; head += DECODE_HEADS) f(Count<DECODE_HEADS>(), head);
  for (; head < heads; ++head) f(Count<1>(), head);
}

// True where arithmetic bounds the call: enough heads for a tile have their keys and values in common.
FM_INLINE bool of_latents(const DecodeArgs& a) {
  return a.shared && a.heads / a.groups >= LATENT_HEADS;
}

// A call; heads: of a group, with what fills a tile; *_columns: whole vectors.
template <class T>
struct Decode {
  const DecodeArgs& args;
  const T* qkv;
  T *keys, *values, *out;
  int64_t share, heads, key_columns, value_columns, splits;
  float* partials;

  int64_t known(int64_t row) const { return min(args.positions[row] + 1, args.slots); }
  // Slots that a task reads of a row's cache, in whole blocks.
  int64_t split_slots(int64_t row) const {
    if (!of_latents(args)) return DECODE_SLOTS;
    const int64_t blocks = known(row) / (DECODE_SLOTS * Tuning::LATENT_TASKS);
    return DECODE_SLOTS * max(1, min(Tuning::LATENT_BLOCKS, blocks));
  }
  int64_t row_splits(int64_t row) const {
    return (known(row) + split_slots(row) - 1) / split_slots(row);
  }
  // part 0 to share: queries, then key and value of a group.
  const T* slot(int64_t row, int64_t group, int64_t part) const {
    return qkv + (row * args.groups + group) * args.group_columns() + part * args.key_size;
  }
  T* key(int64_t row, int64_t group, int64_t slot) const {
    return keys + cached(row, group, slot) * args.key_size;
  }
  T* value(int64_t row, int64_t group, int64_t slot) const {
    return values + cached(row, group, slot) * args.value_row();
  }
  int64_t cached(int64_t row, int64_t group, int64_t slot) const {
    return (args.samples[row] * args.groups + group) * args.slots + slot;
  }
  // (value_columns) sums of P V, the maximum and the sum of P of some slots, for a query head.
  float* partial(int64_t row, int64_t group, int64_t head, int64_t split) const {
    return partials +
           (((row * args.groups + group) * heads + head) * splits + split) * (value_columns + VL);
  }
};

// Keeps the new token's key and value.
template <class T>
static void keep_token(const Decode<T>& call, int64_t row, int64_t group) {
  const DecodeArgs& a = call.args;
  const int64_t slot = a.positions[row] % a.slots;
  __builtin_memcpy(call.key(row, group, slot), call.slot(row, group, call.share),
                   a.key_size * sizeof(T));
  if (a.shared) return;
  __builtin_memcpy(call.value(row, group, slot), call.slot(row, group, call.share + 1),
                   a.value_size * sizeof(T));
}

// Scores of H queries, `columns` apart, against VL / H keys, a lane each; of keys from `count` on -inf.
template <int H, class T>
FM_INLINE vf score_keys(const float* query, int64_t columns, const T* keys, int64_t d,
                        int64_t count) {
  constexpr int KEYS = VL / H;
  vf sum[VL] = {};
  for_vectors(0, d, [&](int64_t i, int lanes) {
    vf key[KEYS];
#pragma GCC unroll 16
    for (int j = 0; j < KEYS; ++j) key[j] = load_lanes(keys + min(j, count - 1) * d + i, lanes);
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const vf q = load_aligned(query + h * columns + i);
#pragma GCC unroll 16
      for (int j = 0; j < KEYS; ++j) sum[h * KEYS + j] = key[j] * q + sum[h * KEYS + j];
    }
  });
  transpose(sum);
#pragma GCC unroll 16
  for (int step = 1; step < VL; step *= 2) {
#pragma GCC unroll 16
    for (int j = 0; j < VL; j += 2 * step) sum[j] += sum[j + step];
  }
  return (vi)(lane_index() & (KEYS - 1)) < static_cast<int32_t>(count)
             ? sum[0]
             : broadcast(-__builtin_inff());
}

// 2^(score - maximum) in place; the maximum and the sum to stats.
FM_INLINE void softmax_slots(float* score, int64_t count, float* stats) {
  vf maximum = broadcast(-__builtin_inff()), sum = {};
  for (int64_t k = 0; k < count; k += VL) maximum = max(maximum, load_aligned(score + k));
  stats[0] = hmax(maximum);
  for (int64_t k = 0; k < count; k += VL) {
    vf x[1] = {load_aligned(score + k) - stats[0]};
    exp2_each(x);
    store_aligned(score + k, x[0]);
    sum += x[0];
  }
  stats[1] = hsum(sum);
}

// Columns [0, N VL) of out = P V for H heads, the last vector `lanes` wide; `row` elements from a value to the next, `out_row` from
// a head's out to the next. Slots in pairs, whose sums do not wait for each other.
template <int N, int H, class T>
FM_INLINE void add_values(const float* prob, const T* values, int64_t row, int64_t count, int lanes,
                          float* out, int64_t out_row) {
  vf even[H][N] = {}, odd[H][N] = {};
  const auto add = [&](vf(&sum)[H][N], int64_t k) {
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      const vf value = load_lanes(values + k * row + v * VL, v + 1 < N ? VL : lanes);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) sum[h][v] = value * prob[h * DECODE_SLOTS + k] + sum[h][v];
    }
  };
  for (int64_t k = 0; k + 1 < count; k += 2) add(even, k), add(odd, k + 1);
  if (count % 2) add(even, count - 1);
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) store_aligned(out + h * out_row + v * VL, even[h][v] + odd[h][v]);
  }
}

// The next block of latents, which are `keys`, against all query heads: one round of the partial softmax `out`, `out_row` apart.
template <class T>
static void add_block(const Decode<T>& call, const LatentBlock& block, const T* keys, bool fresh,
                      float* out, int64_t out_row) {
  const int64_t d = block.d, tiles = block.heads / LATENT_HEADS,
                words = LATENT_KEYS * d * static_cast<int64_t>(sizeof(T)) / 4,
                fetched = (words + tiles - 1) / tiles;
  for (int64_t k = 0; k < block.count; k += LATENT_KEYS) {
    const float* next = reinterpret_cast<const float*>(keys + (k + LATENT_KEYS) * d);
    for (int64_t head = 0; head < block.heads; head += LATENT_HEADS, next += fetched) {
      fetch(next, fetched);
      if (sizeof(T) < sizeof(float) && head == 0) {
        score_latents<true>(block, head, k, keys, d);
      } else {
        score_latents<false>(block, head, k, block.keys, block.row);
      }
    }
  }
  float* const stats = out + call.value_columns;
  for (int64_t head = 0; head < block.heads; head += LATENT_HEADS)
    softmax_latents(block.panel(head), block.count, fresh, stats + head * out_row, out_row);
  for_vector_groups<LATENT_KEYS>(0, call.args.value_size, [&](auto vectors, int64_t i, int lanes) {
    for (int64_t head = 0; head < block.heads; head += LATENT_HEADS) {
      const float* factor = fresh ? nullptr : stats + head * out_row + 2;
      add_latents<decltype(vectors)::value>(block, head, i, lanes, factor, out + head * out_row,
                                            out_row);
    }
  });
}

// The slots of one split of a cache of latents against all query heads of a group. packed: whose queries this thread has.
template <class T>
static void decode_latents(const Decode<T>& call, int64_t row, int64_t group, int64_t split,
                           int64_t& packed) {
  constexpr bool COPIES = sizeof(T) < sizeof(float);
  const int64_t d = call.args.key_size, heads = call.heads, columns = call.key_columns,
                first = split * call.split_slots(row),
                end = min(first + call.split_slots(row), call.known(row));
  if (first >= end) return;
  const int64_t copy_row = columns + Tuning::CACHE_LINE / 4;  // not all rows in the same sets
  const int64_t copies = COPIES ? DECODE_SLOTS * copy_row : 0;
  float* queries =
      static_cast<float*>(scratch(0, (heads * (columns + DECODE_SLOTS) + copies) * sizeof(float)));
  float* scores = queries + heads * columns;
  if (packed != row * call.args.groups + group) {
    packed = row * call.args.groups + group;
    const float c = LOG2_E / call.args.score_divisor;
    for (int64_t h = 0; h < heads; ++h) {
      for_vectors(0, d, [&](int64_t i, int lanes) {
        const vf query = h < call.share ? load_lanes(call.slot(row, group, h) + i, lanes) : vf{};
        store_aligned(queries + h * columns + i, query * c);
      });
    }
  }
  float* const out = call.partial(row, group, 0, split);
  const int64_t out_row = call.partial(row, group, 1, split) - out;
  for (int64_t at = first; at < end; at += DECODE_SLOTS) {
    T* keys = call.key(row, group, at);
    LatentBlock block{scores + heads * DECODE_SLOTS,
                      copy_row,
                      min(DECODE_SLOTS, end - at),
                      d,
                      queries,
                      heads,
                      columns,
                      scores};
    if constexpr (!COPIES) {
      block.keys = keys;
      block.row = d;
    }
    add_block(call, block, keys, at == first, out, out_row);
  }
}

// The slots of one split against all query heads of a group.
template <class T>
static void decode_task(const Decode<T>& call, int64_t row, int64_t group, int64_t split) {
  const int64_t d = call.args.key_size, stride = call.args.value_row(), share = call.share,
                first = split * DECODE_SLOTS;
  const int64_t count = min(DECODE_SLOTS, call.known(row) - first);
  if (count <= 0) return;
  float* query =
      static_cast<float*>(scratch(0, share * (call.key_columns + DECODE_SLOTS) * sizeof(float)));
  float* score = query + share * call.key_columns;
  const float c = LOG2_E / call.args.score_divisor;
  for (int64_t h = 0; h < share; ++h) {
    for_vectors(0, d, [&](int64_t i, int lanes) {
      store_aligned(query + h * call.key_columns + i,
                    load_lanes(call.slot(row, group, h) + i, lanes) * c);
    });
  }
  const T *keys = call.key(row, group, first), *values = call.value(row, group, first);
  for (int64_t k = 0; k < count; k += VL) {
    for_decode_heads(share, [&](auto heads, int64_t head) FM_INLINE_LAMBDA {
      constexpr int H = decltype(heads)::value, KEYS = VL / H;
      for (int64_t j = k; j < k + VL; j += KEYS) {
        const vf scores = score_keys<H>(query + head * call.key_columns, call.key_columns,
                                        keys + j * d, d, count - j);
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h)
          store_part<KEYS>(score + (head + h) * DECODE_SLOTS + j, scores, h);
      }
    });
  }
  float* const out = call.partial(row, group, 0, split);
  const int64_t out_row = call.partial(row, group, 1, split) - out;
  for (int64_t h = 0; h < share; ++h)
    softmax_slots(score + h * DECODE_SLOTS, count, out + h * out_row + call.value_columns);
  constexpr int64_t COLUMNS = 4 * VL;
  for (int64_t i = 0; i < call.args.value_size; i += COLUMNS) {
    for_decode_heads(share, [&](auto heads, int64_t head) FM_INLINE_LAMBDA {
      constexpr int H = decltype(heads)::value, N = H > 1 ? 2 : 4;
      const float* prob = score + head * DECODE_SLOTS;
      float* const to = out + head * out_row;
      if (i + COLUMNS <= call.args.value_size) {
        for (int64_t at = i; at < i + COLUMNS; at += N * VL)
          add_values<N, H>(prob, values + at, stride, count, VL, to + at, out_row);
      } else {
        for_vectors(i, call.args.value_size, [&](int64_t at, int lanes) {
          add_values<1, H>(prob, values + at, stride, count, lanes, to + at, out_row);
        });
      }
    });
  }
}

// out of a query head from its partial softmaxes.
template <class T>
static void combine_splits(const Decode<T>& call, int64_t row, int64_t head) {
  const int64_t splits = call.row_splits(row), columns = call.value_columns,
                group = head / call.share, in_group = head % call.share;
  float maximum = -__builtin_inff();
  for (int64_t split = 0; split < splits; ++split) {
    const float m = call.partial(row, group, in_group, split)[columns];
    maximum = maximum > m ? maximum : m;
  }
  float* sum = static_cast<float*>(scratch(0, columns * sizeof(float)));
  vf total = {};
  for (int64_t split = 0; split < splits; ++split) {
    const float* part = call.partial(row, group, in_group, split);
    vf factor[1] = {broadcast(part[columns] - maximum)};
    exp2_each(factor);
    total = factor[0] * part[columns + 1] + total;
    for (int64_t i = 0; i < columns; i += VL) {
      store_aligned(sum + i,
                    load_aligned(part + i) * factor[0] + (split ? load_aligned(sum + i) : vf{}));
    }
  }
  const vf scale = reciprocal(total);
  T* out = call.out + (row * call.args.heads + head) * call.args.value_size;
  for_vectors(0, call.args.value_size, [&](int64_t i, int lanes) {
    store_lanes(out + i, load_aligned(sum + i) * scale, lanes);
  });
}

template <class T>
static void decode_of(const T* qkv, T* keys, T* values, T* out, const DecodeArgs& a) {
  Decode<T> call{a,
                 qkv,
                 keys,
                 values,
                 out,
                 a.heads / a.groups,
                 of_latents(a) ? round_up(a.heads / a.groups, LATENT_HEADS) : a.heads / a.groups,
                 round_up(a.key_size, VL),
                 round_up(a.value_size, VL),
                 0,
                 nullptr};
  for (int64_t row = 0; row < a.rows; ++row) {
    call.splits = max(call.splits, call.row_splits(row));
  }
  const int64_t partials = a.rows * a.groups * call.heads * call.splits;
  call.partials =
      static_cast<float*>(scratch(1, partials * (call.value_columns + VL) * sizeof(float)));
  TaskQueue tokens{a.rows * a.groups}, slots{a.rows * a.groups * call.splits},
      heads{a.rows * a.heads};
  parallel_run([&](int, int) {
    for (int64_t task; (task = tokens.take()) < tokens.tasks;)
      keep_token(call, task / a.groups, task % a.groups);
    barrier();
    int64_t packed = -1;
    for (int64_t task; (task = slots.take()) < slots.tasks;) {
      const int64_t row = task / call.splits / a.groups, group = task / call.splits % a.groups,
                    split = task % call.splits;
      of_latents(a) ? decode_latents(call, row, group, split, packed)
                    : decode_task(call, row, group, split);
    }
    barrier();
    for (int64_t task; (task = heads.take()) < heads.tasks;)
      combine_splits(call, task / a.heads, task % a.heads);
  });
}

static void attention_decode(const void* qkv, void* keys, void* values, void* out, DType dtype,
                             const DecodeArgs& a) {
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    decode_of(static_cast<const T*>(qkv), static_cast<T*>(keys), static_cast<T*>(values),
              static_cast<T*>(out), a);
  });
}

}  // namespace fm::FM_TARGET
