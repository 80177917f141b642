// Attention of one new token of each sample against the keys and values that are kept of the earlier ones: generation.
//
//   qkv (rows, (heads + 2 groups) d)    out (rows, heads d)    keys, values (samples, groups, slots, d)
//
// Row r is position positions[r] of sample samples[r]; its key and value are kept in slot position mod slots, and the last
// `slots` positions are attended to, so a window is a short cache. Memory bounds this: a task reads some slots of one group once
// for all query heads of it, and leaves a partial softmax (Dao et al., Flash-Decoding, 2023), which are put together in order. How
// slots are cut follows from their number alone, so results have the same bits for any number of threads.
// Reference: attention_reference.cc. Tested by tests/kernels/test_attention_decode.py. Included by attention.h.
#pragma once
#include "attention/attention_forward.h"

namespace fm::FM_TARGET {

constexpr int64_t DECODE_SLOTS = Tuning::DECODE_SLOTS;

static_assert(DECODE_SLOTS % VL == 0, "scores fill vectors");

// A call; d_padded: whole vectors of a head.
template <class T>
struct Decode {
  const DecodeArgs& args;
  const T* qkv;
  T *keys, *values, *out;
  int64_t share, d_padded, splits;
  float* partials;

  int64_t known(int64_t row) const { return min(args.positions[row] + 1, args.slots); }
  // part 0 to share: queries, then key and value of a group.
  const T* slot(int64_t row, int64_t group, int64_t part) const {
    return qkv + ((row * args.groups + group) * (share + 2) + part) * args.d;
  }
  int64_t cached(int64_t row, int64_t group, int64_t slot) const {
    return ((args.samples[row] * args.groups + group) * args.slots + slot) * args.d;
  }
  // (d_padded) sums of P V, the maximum and the sum of P of some slots, for a query head.
  float* partial(int64_t row, int64_t head, int64_t split) const {
    return partials + ((row * args.heads + head) * splits + split) * (d_padded + VL);
  }
};

// Keeps the new token's key and value.
template <class T>
static void keep_token(const Decode<T>& call, int64_t row, int64_t group) {
  const int64_t to = call.cached(row, group, call.args.positions[row] % call.args.slots);
  __builtin_memcpy(call.keys + to, call.slot(row, group, call.share), call.args.d * sizeof(T));
  __builtin_memcpy(call.values + to, call.slot(row, group, call.share + 1),
                   call.args.d * sizeof(T));
}

// Scores of one query against VL keys, of which those from `count` on are -inf.
template <class T>
FM_INLINE vf score_keys(const float* query, const T* keys, int64_t d, int64_t count) {
  vf sum[VL] = {};
  for_vectors(0, d, [&](int64_t i, int lanes) {
    const vf q = load_aligned(query + i);
#pragma GCC unroll 16
    for (int j = 0; j < VL; ++j)
      sum[j] = load_lanes(keys + min(j, count - 1) * d + i, lanes) * q + sum[j];
  });
  transpose(sum);
#pragma GCC unroll 16
  for (int step = 1; step < VL; step *= 2) {
#pragma GCC unroll 16
    for (int j = 0; j < VL; j += 2 * step) sum[j] += sum[j + step];
  }
  return (vi)lane_index() < static_cast<int32_t>(count) ? sum[0] : broadcast(-__builtin_inff());
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

// Columns [0, N VL) of out = P V, the last vector `lanes` wide; slots in pairs, whose sums do not wait for each other.
template <int N, class T>
FM_INLINE void add_values(const float* prob, const T* values, int64_t d, int64_t count, int lanes,
                          float* out) {
  vf even[N] = {}, odd[N] = {};
  const auto add = [&](vf(&sum)[N], int64_t k) {
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v)
      sum[v] = load_lanes(values + k * d + v * VL, v + 1 < N ? VL : lanes) * prob[k] + sum[v];
  };
  for (int64_t k = 0; k + 1 < count; k += 2) add(even, k), add(odd, k + 1);
  if (count % 2) add(even, count - 1);
#pragma GCC unroll 4
  for (int v = 0; v < N; ++v) store_aligned(out + v * VL, even[v] + odd[v]);
}

// The slots of one split against all query heads of a group.
template <class T>
static void decode_task(const Decode<T>& call, int64_t row, int64_t group, int64_t split) {
  const int64_t d = call.args.d, share = call.share, first = split * DECODE_SLOTS;
  const int64_t count = min(DECODE_SLOTS, call.known(row) - first);
  if (count <= 0) return;
  float* query =
      static_cast<float*>(scratch(0, share * (call.d_padded + DECODE_SLOTS) * sizeof(float)));
  float* score = query + share * call.d_padded;
  const float c = LOG2_E / __builtin_sqrtf(static_cast<float>(d));
  for (int64_t h = 0; h < share; ++h) {
    for_vectors(0, d, [&](int64_t i, int lanes) {
      store_aligned(query + h * call.d_padded + i,
                    load_lanes(call.slot(row, group, h) + i, lanes) * c);
    });
  }
  const T *keys = call.keys + call.cached(row, group, first),
          *values = call.values + call.cached(row, group, first);
  for (int64_t k = 0; k < count; k += VL) {
    for (int64_t h = 0; h < share; ++h) {
      store_aligned(score + h * DECODE_SLOTS + k,
                    score_keys(query + h * call.d_padded, keys + k * d, d, min(VL, count - k)));
    }
  }
  const auto to = [&](int64_t h) { return call.partial(row, group * share + h, split); };
  for (int64_t h = 0; h < share; ++h)
    softmax_slots(score + h * DECODE_SLOTS, count, to(h) + call.d_padded);
  for (int64_t i = 0; i < d; i += 4 * VL) {
    for (int64_t h = 0; h < share; ++h) {
      const float* prob = score + h * DECODE_SLOTS;
      if (i + 4 * VL <= d) {
        add_values<4>(prob, values + i, d, count, VL, to(h) + i);
      } else {
        for_vectors(i, d, [&](int64_t at, int lanes) {
          add_values<1>(prob, values + at, d, count, lanes, to(h) + at);
        });
      }
    }
  }
}

// out of a query head from its partial softmaxes.
template <class T>
static void combine_splits(const Decode<T>& call, int64_t row, int64_t head) {
  const int64_t splits = (call.known(row) + DECODE_SLOTS - 1) / DECODE_SLOTS,
                d_padded = call.d_padded;
  float maximum = -__builtin_inff();
  for (int64_t split = 0; split < splits; ++split) {
    const float m = call.partial(row, head, split)[d_padded];
    maximum = maximum > m ? maximum : m;
  }
  float* sum = static_cast<float*>(scratch(0, d_padded * sizeof(float)));
  vf total = {};
  for (int64_t split = 0; split < splits; ++split) {
    const float* part = call.partial(row, head, split);
    vf factor[1] = {broadcast(part[d_padded] - maximum)};
    exp2_each(factor);
    total = factor[0] * part[d_padded + 1] + total;
    for (int64_t i = 0; i < d_padded; i += VL) {
      store_aligned(sum + i,
                    load_aligned(part + i) * factor[0] + (split ? load_aligned(sum + i) : vf{}));
    }
  }
  const vf scale = reciprocal(total);
  T* out = call.out + (row * call.args.heads + head) * call.args.d;
  for_vectors(0, call.args.d, [&](int64_t i, int lanes) {
    store_lanes(out + i, load_aligned(sum + i) * scale, lanes);
  });
}

template <class T>
static void decode_of(const T* qkv, T* keys, T* values, T* out, const DecodeArgs& a) {
  Decode<T> call{a, qkv, keys, values, out, a.heads / a.groups, round_up(a.d, VL), 0, nullptr};
  for (int64_t row = 0; row < a.rows; ++row) {
    call.splits = max(call.splits, (call.known(row) + DECODE_SLOTS - 1) / DECODE_SLOTS);
  }
  const int64_t partials = a.rows * a.heads * call.splits;
  call.partials = static_cast<float*>(scratch(1, partials * (call.d_padded + VL) * sizeof(float)));
  TaskQueue tokens{a.rows * a.groups}, slots{a.rows * a.groups * call.splits},
      heads{a.rows * a.heads};
  parallel_run([&](int, int) {
    for (int64_t task; (task = tokens.take()) < tokens.tasks;)
      keep_token(call, task / a.groups, task % a.groups);
    barrier();
    for (int64_t task; (task = slots.take()) < slots.tasks;) {
      decode_task(call, task / call.splits / a.groups, task / call.splits % a.groups,
                  task % call.splits);
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
