// Query heads against a block of keys that are kept once for all of them, and whose beginnings are the values: decoding with absorbed
// projections (multi-head latent attention, DeepSeek-V2, arXiv:2405.04434). Each number of the cache takes part in two
// multiply-adds of every head, so arithmetic bounds this, not memory. Lanes are columns in both products:
//
//   scores   LATENT_HEADS x LATENT_KEYS sums over columns, whose lanes are added at the end
//   values   LATENT_HEADS x LATENT_KEYS vectors of columns, sums over keys
//
// The first heads leave 16-bit keys as floats for all the others. Scores are panels (heads / LATENT_HEADS, DECODE_SLOTS, LATENT_HEADS),
// which the softmax and the values read in order. Tested by tests/kernels/test_attention_decode.py. Included by attention_decode.h.
#pragma once
#include "attention/attention_forward.h"

namespace fm::FM_TARGET {

constexpr int64_t DECODE_SLOTS = Tuning::DECODE_SLOTS;

// As many sums as a tile of attention has.
constexpr int LATENT_HEADS = 4, LATENT_KEYS = ATTENTION_MR * ATTENTION_NV / LATENT_HEADS;

// A block of `count` keys (count, d) as floats, `row` apart, and what is multiplied with them: queries (heads, columns), padded with
// zeros to multiples of LATENT_HEADS and VL.
struct LatentBlock {
  float* keys;
  int64_t row, count, d;
  const float* queries;
  int64_t heads, columns;
  float* scores;
  float* panel(int64_t head) const { return scores + head * DECODE_SLOTS; }
};

// Scores of LATENT_HEADS heads against keys [k0, k0 + LATENT_KEYS), which are read from `keys`, `row` apart. COPY: and left in the
// block.
template <bool COPY, class T>
FM_INLINE void score_latents(const LatentBlock& x, int64_t head, int64_t k0, const T* keys,
                             int64_t row) {
  const float* query = x.queries + head * x.columns;
  const T* from[LATENT_KEYS];
  float* to[LATENT_KEYS];
#pragma GCC unroll 8
  for (int j = 0; j < LATENT_KEYS; ++j) {
    const int64_t k = min(k0 + j, x.count - 1);
    from[j] = keys + k * row;
    to[j] = x.keys + k * x.row;
  }
  vf sum[LATENT_KEYS][LATENT_HEADS] = {};
  for_vectors(0, x.d, [&](int64_t i, int lanes) {
    vf key[LATENT_KEYS];
#pragma GCC unroll 8
    for (int j = 0; j < LATENT_KEYS; ++j) {
      key[j] = load_lanes(from[j] + i, lanes);
      if (COPY) store_aligned(to[j] + i, key[j]);
    }
#pragma GCC unroll 4
    for (int h = 0; h < LATENT_HEADS; ++h) {
      const vf q = load_aligned(query + h * x.columns + i);
#pragma GCC unroll 8
      for (int j = 0; j < LATENT_KEYS; ++j) sum[j][h] = key[j] * q + sum[j][h];
    }
  });
  float* panel = x.panel(head) + k0 * LATENT_HEADS;
#pragma GCC unroll 8
  for (int j = 0; j < LATENT_KEYS; ++j) {
    if (k0 + j < x.count) store_part<LATENT_HEADS>(panel + j * LATENT_HEADS, sum_four(sum[j]), 0);
  }
}

// One round of the online softmax: score -> 2^(score - maximum) in a panel. stats, `row` apart from a head to the next: the running
// maximum and sum, and the factor of what earlier rounds summed. fresh: there was none.
FM_INLINE void softmax_latents(float* panel, int64_t count, bool fresh, float* stats, int64_t row) {
  const int64_t end = round_up(count * LATENT_HEADS, VL);
  for (int64_t i = count * LATENT_HEADS; i < end; ++i) panel[i] = -__builtin_inff();
  vf old = broadcast(-__builtin_inff()), sum = {};
  for (int h = 0; h < VL && !fresh; ++h) old[h] = stats[h % LATENT_HEADS * row];
  vf maximum = old;
  for (int64_t i = 0; i < end; i += VL) maximum = max(maximum, load_aligned(panel + i));
  maximum = over_fours(maximum, [](vf a, vf b) { return max(a, b); });
  for (int64_t i = 0; i < end; i += VL) {
    vf x[1] = {load_aligned(panel + i) - maximum};
    exp2_each(x);
    store_aligned(panel + i, x[0]);
    sum += x[0];
  }
  sum = over_fours(sum, [](vf a, vf b) { return a + b; });
  vf factor[1] = {old - maximum};
  exp2_each(factor);
  for (int h = 0; h < LATENT_HEADS; ++h, stats += row) {
    stats[0] = maximum[h];
    stats[1] = fresh ? sum[h] : stats[1] * factor[0][h] + sum[h];
    stats[2] = factor[0][h];
  }
}

// N vectors of columns of out = factor out + P V for LATENT_HEADS heads, one vector `lanes` wide; out and factor are `row` apart from
// a head to the next. Without factor: out = P V.
template <int N>
FM_INLINE void add_latents(const LatentBlock& x, int64_t head, int64_t column, int lanes,
                           const float* factor, float* out, int64_t row) {
  const float *values = x.keys + column, *prob = x.panel(head);
  vf sum[LATENT_HEADS][N] = {};
  if (factor) {
#pragma GCC unroll 4
    for (int h = 0; h < LATENT_HEADS; ++h) {
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v)
        sum[h][v] = load_aligned(out + h * row + column + v * VL) * factor[h * row];
    }
  }
  for (int64_t k = 0; k < x.count; ++k, values += x.row, prob += LATENT_HEADS) {
    vf value[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) value[v] = load_lanes(values + v * VL, N > 1 ? VL : lanes);
#pragma GCC unroll 4
    for (int h = 0; h < LATENT_HEADS; ++h) {
#pragma GCC unroll 8
      for (int v = 0; v < N; ++v) sum[h][v] = value[v] * prob[h] + sum[h][v];
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < LATENT_HEADS; ++h) {
#pragma GCC unroll 8
    for (int v = 0; v < N; ++v) store_aligned(out + h * row + column + v * VL, sum[h][v]);
  }
}

}  // namespace fm::FM_TARGET
