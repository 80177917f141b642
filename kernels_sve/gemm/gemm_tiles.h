// The micro-kernel on tiles (tiles.h): 32 x 32 sums of bfloat16 or int8 products. B's panels are those of Bf16Pairs; A's are tiles. Included by
// gemm_micro.h, inside its namespace.
#pragma once

static_assert(NR == TILE_COLUMNS, "a panel of B is two tiles wide");

struct TilePairs : Bf16Pairs {
  static constexpr int TILE_ROWS = 2 * TILE, ROW_STEP = TILE;
  static constexpr int BESIDE = TILE;
  static constexpr bool TILES = true;
};

struct Int8Tiles : Int8Words {
  static constexpr int TILE_ROWS = 2 * TILE, ROW_STEP = TILE;
  static constexpr int BESIDE = TILE;
  static constexpr bool TILES = true;
};

// micro_kernel for such panels. It does not add to C.
template <class Words, int ROWS>
static __attribute__((noinline)) void tiles_kernel(int64_t words, const uint32_t* a, const float* b,
                                                   float* c, int64_t ldc, bool, Fetches& fetches) {
  static_assert(TILE % Fetches::STEPS == 0, "whole turns in a step");
  Fetches local = fetches;  // the tiles' own accesses would else make the loop write it back
  local.begin(ROWS, words);
  zero_sums<ROWS / TILE>();
#pragma GCC unroll 1
  for (int run = 0; run < Words::PARTS; ++run) {
    const int64_t first = run * (words / Words::PARTS);
    multiply_tiles<ROWS / TILE, Words::INT8>(
        a + first * TILE_COLUMNS, reinterpret_cast<const uint32_t*>(b), (words - first) / TILE,
        [&]() FM_INLINE_LAMBDA {
#pragma GCC unroll 4
          for (int turn = 0; turn < TILE / Fetches::STEPS; ++turn) local.turn();
        });
  }
  fetches = local;
  store_sums<ROWS / TILE>(c, ldc * 4);
}

// pack_panels of gemm_pack.h for A.
template <class Words, class T>
FM_INLINE int pack_tile_panels(const T* src, int64_t i_stride, int64_t k_stride, int64_t left,
                               int64_t valid, int64_t depth, Scales scales, float* out) {
  const int panels =
      i_stride == 1 && left >= Tuning::PACK_PANELS * TILE_COLUMNS ? Tuning::PACK_PANELS : 1;
  const int64_t part = words_of<Words>(depth) * TILE_COLUMNS;
  for (int64_t q = 0; q < panels; ++q, valid -= TILE_COLUMNS) {
    const T* first = src + q * TILE_COLUMNS * i_stride;
    for_parts<Words, true>(scales, [&](auto reader, int p) FM_INLINE_LAMBDA {
      pack_tiles<decltype(reader)>(first, i_stride, k_stride, valid, depth,
                                   out + (q * Words::PARTS + p) * part, scales);
    });
    if constexpr (Words::INT8) scales = scales_from(scales, TILE_COLUMNS);
  }
  return panels;
}

// out[i] += the sum over k of row i, of a panel of A.
FM_INLINE void add_tile_sums(const float* panel, int64_t words, float* out, int64_t count) {
  for (int64_t first = 0; first < count; first += TILE, panel += TILE_WORDS) {
    vf sums[TILE] = {};
    for (int64_t k = 0; k < words; k += TILE) {
      const uint32_t* tile = reinterpret_cast<const uint32_t*>(panel + k * TILE_COLUMNS);
#pragma GCC unroll 16
      for (int r = 0; r < TILE; ++r) sums[r] = Bf16Pairs::sum_words(tile + r * TILE, VL, sums[r]);
    }
    transpose(sums);
    vf total = sums[0];
#pragma GCC unroll 16
    for (int i = 1; i < TILE; ++i) total += sums[i];
    const int rows = static_cast<int>(min(TILE, count - first));
    store_lanes(out + first, load_lanes(out + first, rows) + total, rows);
  }
}
