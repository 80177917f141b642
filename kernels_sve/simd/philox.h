// Counter-based random numbers in vectors: Philox4x32-10, dropout and normal initialisation. The layout is in
// philox_layout.h. Reusable: philox_keep_bits() gives the dropout mask of 64 columns, for kernels that recompute it in
// tiles (attention). Reference: philox_reference.cc. Tested by tests/kernels/test_philox.py.
#pragma once
#include "simd/philox_layout.h"
#include "simd/simd.h"

namespace fm::FM_TARGET {

static_assert(PHILOX_CALLS % VL == 0, "a block is a whole number of vectors");

FM_INLINE void philox_round(vu c[4], PhiloxKey key) {
  const vu high0 = mul_high(c[0], PHILOX_M0), low0 = c[0] * PHILOX_M0;
  const vu high1 = mul_high(c[2], PHILOX_M1), low1 = c[2] * PHILOX_M1;
  c[0] = high1 ^ c[1] ^ key.k0;
  c[2] = high0 ^ c[3] ^ key.k1;
  c[1] = low1;
  c[3] = low0;
}

// c[i][0..3]: the counter words of VL calls, replaced by their random words. N independent sets take turns, so that one
// set's multiplications hide the other's.
template <int N>
FM_INLINE void philox_sets(vu c[N][4], PhiloxKey key) {
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) philox_round(c[i], key);
    key.k0 += PHILOX_W0;
    key.k1 += PHILOX_W1;
  }
}

FM_INLINE void philox(vu c[4], PhiloxKey key) {
  philox_sets<1>(reinterpret_cast<vu(*)[4]>(c), key);
}

constexpr int BLOCK_VECTORS = PHILOX_BLOCK / VL, BLOCK_SETS = PHILOX_CALLS / VL;
// Blocks whose sets of counters are worked on together.
constexpr int PHILOX_BLOCKS =
    Tuning::PHILOX_SETS > BLOCK_SETS ? Tuning::PHILOX_SETS / BLOCK_SETS : 1;

// The words of columns [64 * block, 64 * (block + BLOCKS)) of ROWS rows, one row after the other: words[v] of the first holds
// columns 64 * block + v * VL + lane.
template <int BLOCKS, int ROWS = 1>
FM_INLINE void philox_words(PhiloxKey key, uint64_t sample, uint32_t row, uint32_t block,
                            vu (&words)[ROWS * BLOCKS * BLOCK_VECTORS]) {
  constexpr int OF_ROW = BLOCKS * BLOCK_SETS, SETS = ROWS * OF_ROW;
  constexpr int TOGETHER = SETS < Tuning::PHILOX_SETS ? SETS : Tuning::PHILOX_SETS;
#pragma GCC unroll 8
  for (int first = 0; first < SETS; first += TOGETHER) {
    vu c[TOGETHER][4];
#pragma GCC unroll 4
    for (int i = 0; i < TOGETHER; ++i) {
      c[i][0] = lane_index() + (block * PHILOX_CALLS + (first + i) % OF_ROW * VL);
      c[i][1] = broadcast(row + (first + i) / OF_ROW);
      c[i][2] = broadcast(static_cast<uint32_t>(sample));
      c[i][3] = broadcast(static_cast<uint32_t>(sample >> 32));
    }
    philox_sets<TOGETHER>(c, key);
#pragma GCC unroll 4
    for (int i = 0; i < TOGETHER; ++i) {
      const int set = first + i, at = set / BLOCK_SETS * BLOCK_VECTORS + set % BLOCK_SETS;
#pragma GCC unroll 4
      for (int word = 0; word < 4; ++word) words[at + word * BLOCK_SETS] = c[i][word];
    }
  }
}

// The dropout mask of the same columns: -1 in the lanes that stay, 0 in those dropped. For attention scores, row = head
// * s + query in the global (heads, s, s) tensor of the sample and the column is the key position.
FM_INLINE void philox_keep_bits(PhiloxKey key, uint64_t sample, uint32_t row, uint32_t block,
                                uint32_t threshold, vi keep[BLOCK_VECTORS]) {
  vu words[BLOCK_VECTORS];
  philox_words<1>(key, sample, row, block, words);
#pragma GCC unroll 16
  for (int v = 0; v < BLOCK_VECTORS; ++v) keep[v] = words[v] >= threshold;
}

// Runs body(words, i, v) for each vector of the blocks that touch columns [col0, col0 + cols): v counts vectors within
// the block and i = column of the vector's first lane - col0, which may be negative or reach beyond cols in the first
// and the last block.
template <class F>
FM_INLINE void for_philox_row(PhiloxKey key, uint64_t sample, uint32_t row, int64_t col0,
                              int64_t cols, const F& body) {
  for (int64_t block = col0 / PHILOX_BLOCK; block * PHILOX_BLOCK < col0 + cols; ++block) {
    vu words[BLOCK_VECTORS];
    philox_words<1>(key, sample, row, static_cast<uint32_t>(block), words);
    for (int v = 0; v < BLOCK_VECTORS; ++v) {
      const int64_t i = block * PHILOX_BLOCK + v * VL - col0;
      if (i > -VL && i < cols) body(words, i, v);
    }
  }
}

// Row-local columns [i, i + VL) cut to [0, cols), computed by f(vector in) -> vector out; whole vectors go straight
// through.
template <class T, class F>
FM_INLINE void map_columns(const T* x, T* out, int64_t i, int64_t cols, const F& f) {
  if (i >= 0 && i + VL <= cols) return store(out + i, f(load(x + i)));
  const int first = i < 0 ? static_cast<int>(-i) : 0;
  const int end = i + VL > cols ? static_cast<int>(cols - i) : VL;
  T lanes[VL] = {};
  for (int l = first; l < end; ++l) lanes[l] = x[i + l];
  store(lanes, f(load(lanes)));
  for (int l = first; l < end; ++l) out[i + l] = lanes[l];
}

// Columns [0, cols) of a row that begins at column col0: whole blocks together, the edges one by one.
template <class T>
FM_INLINE void dropout_row(const DropoutArgs& a, PhiloxKey key, uint64_t sample, uint32_t row,
                           const T* from, T* to) {
  const uint32_t threshold = dropout_threshold(a.p);
  const float scale = 1.0f / (1.0f - a.p);
  const auto edge = [&](int64_t begin, int64_t end) {
    for_philox_row(
        key, sample, row, a.key.col0 + begin, end - begin, [&](const vu* words, int64_t i, int v) {
          map_columns(from + begin, to + begin, i, end - begin,
                      [&](vf value) { return words[v] >= threshold ? value * scale : vf{}; });
        });
  };
  constexpr int VECTORS = PHILOX_BLOCKS * BLOCK_VECTORS;
  const int64_t first = min(a.cols, (PHILOX_BLOCK - a.key.col0 % PHILOX_BLOCK) % PHILOX_BLOCK);
  int64_t i = first;
  if (first) edge(0, first);
  for (; i + VECTORS * VL <= a.cols; i += VECTORS * VL) {
    vu words[VECTORS];
    philox_words<PHILOX_BLOCKS>(key, sample, row,
                                static_cast<uint32_t>((a.key.col0 + i) / PHILOX_BLOCK), words);
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) {
      store(to + i + v * VL, words[v] >= threshold ? load(from + i + v * VL) * scale : vf{});
    }
  }
  if (i < a.cols) edge(i, a.cols);
}

template <class T>
static void dropout_of(const T* x, T* out, const DropoutArgs& a) {
  const PhiloxKey key = philox_key(a.key.seed, a.key.stream);
  const int64_t rows = a.outer * a.samples * a.inner;
  parallel_for(rows, 1 + Tuning::GRAIN / (a.cols + 1), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t sample = a.key.first_sample + r / a.inner % a.samples;
      const int64_t row = a.key.row0 + r / (a.inner * a.samples) * a.inner + r % a.inner;
      dropout_row(a, key, sample, static_cast<uint32_t>(row), x + r * a.cols, out + r * a.cols);
    }
  });
}

static void dropout(const void* x, void* out, DType dtype, const DropoutArgs& args) {
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    dropout_of(static_cast<const T*>(x), static_cast<T*>(out), args);
  });
}

// Box and Muller: words 0 and 1 of a call are one pair of normals, words 2 and 3 the other.
FM_INLINE vf box_muller(const vu* words, int v) {
  constexpr int PARTS = PHILOX_CALLS / VL;
  const int word = v / PARTS, part = v % PARTS;
  const vf u1 = (to_float(words[(word & 2) * PARTS + part] >> 8) + 0.5f) * 0x1p-24f;  // (0, 1]
  const vf u2 = to_float(words[(word | 1) * PARTS + part] >> 8) * 0x1p-24f;           // [0, 1)
  vf sine, cosine;
  sincos_turns(u2, sine, cosine);
  return sqrt(max(log(u1) * -2.0f, vf{})) * (word & 1 ? sine : cosine);
}

static void philox_normal(float* out, const NormalArgs& a) {
  const PhiloxKey key = philox_key(a.seed, a.stream);
  parallel_for(a.rows, 1 + Tuning::GRAIN / 4 / (a.cols + 1), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* to = out + r * a.cols;
      for_philox_row(key, 0, static_cast<uint32_t>(a.row0 + r), a.col0, a.cols,
                     [&](const vu* words, int64_t i, int v) {
                       const vf value = box_muller(words, v) * a.std + a.mean;
                       map_columns(to, to, i, a.cols, [&](vf) { return value; });
                     });
    }
  });
}

// The bare generator, for known answers: counter and out are (calls, 4).
static void philox4x32(const uint32_t* counter, uint32_t* out, int64_t calls, uint32_t key0,
                       uint32_t key1) {
  for_vectors(0, calls, [&](int64_t first, int lanes) {
    vu c[4] = {};
    for (int l = 0; l < lanes; ++l)
      for (int word = 0; word < 4; ++word) c[word][l] = counter[(first + l) * 4 + word];
    philox(c, {key0, key1});
    for (int l = 0; l < lanes; ++l)
      for (int word = 0; word < 4; ++word) out[(first + l) * 4 + word] = c[word][l];
  });
}

}  // namespace fm::FM_TARGET
