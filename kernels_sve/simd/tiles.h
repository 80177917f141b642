// Matrix tiles: registers of 16 rows of 64 bytes and one instruction that multiplies two of them (Intel AMX). A kernel that uses
// them holds 2 x 2 sums of 16 x 16 floats in tiles 0 to 3, two tiles of A in 4 and 5 and two of B in 6 and 7, so that every tile
// loaded is multiplied at least once by each of two others.
//
// Hooks, in tile_amx.h and, where FM_EMULATED_TILES, in tile_emulated.h; p is any address, stride the bytes between two rows:
//   tiles_begin() tiles_end()                  in each thread around its use of tiles: all eight become 16 rows of 64 bytes
//   tile_zero<T>() tile_load<T>(p, stride) tile_store<T>(p, stride)
//   tile_dot<INT8, C, A, B>()                  C (16 x 16 floats) += A (16 rows of 16 pairs of k) B (16 pairs of k, 16 columns); with
//                                              INT8, C (16 x 16 int32) += the same of four int8 of k to a word
//
// Operands are pairs of bfloat16 of neighbouring k in 32-bit words, in steps of 16 words of k, with zeros beyond the matrix:
//   A   [step][2 tiles][16 rows][16 words of k]       pack_tiles
//   B   [step][16 words of k][TILE_COLUMNS]           the panels of pairs that vectors use as well
#pragma once
#include "simd/transpose.h"

#if defined(__AMX_TILE__) || \
    defined(                 \
        FM_EMULATED_TILES)  // FM_BASE, the target with the same vectors, runs what is not bfloat16
#define FM_HAS_TILES
#define FM_LEAVE_TO_BASE(dtype, name, ...) \
  if ((dtype) != DType::bf16) return FM_BASE::name##_kernel(__VA_ARGS__);
#ifdef FM_EMULATED_TILES
#include "simd/tile_emulated.h"
#else
#include "simd/tile_amx.h"
#endif

namespace fm::FM_TARGET {

constexpr int TILE = 16, TILE_WORDS = TILE * TILE, TILE_COLUMNS = 2 * TILE,
              TILE_DEPTH = 2 * TILE;  // TILE_DEPTH: k of a step
constexpr int64_t TILE_STEP = 2 * TILE_WORDS,
                  SUMS_ROW =
                      TILE_COLUMNS * 4;  // words of an operand; bytes of a row of sums side by side
static_assert(VL == TILE, "a row of a tile is a vector");

// The sums of ROWS (1 or 2) rows of tiles, two to a row; `stride` bytes from a row of floats to the next.
template <int ROWS>
FM_INLINE void zero_sums() {
  tile_zero<0>(), tile_zero<1>();
  if constexpr (ROWS > 1) tile_zero<2>(), tile_zero<3>();
}
template <int ROWS>
FM_INLINE void load_sums(const float* c, int64_t stride) {
  tile_load<0>(c, stride), tile_load<1>(c + TILE, stride);
  const float* below = c + TILE * stride / 4;
  if constexpr (ROWS > 1) tile_load<2>(below, stride), tile_load<3>(below + TILE, stride);
}
template <int ROWS>
FM_INLINE void store_sums(float* c, int64_t stride) {
  tile_store<0>(c, stride), tile_store<1>(c + TILE, stride);
  float* below = c + TILE * stride / 4;
  if constexpr (ROWS > 1) tile_store<2>(below, stride), tile_store<3>(below + TILE, stride);
}

// sums += A B over `steps` steps of k; before() runs ahead of each.
template <int ROWS, bool INT8 = false, class F>
FM_INLINE void multiply_tiles(const uint32_t* a, const uint32_t* b, int64_t steps,
                              const F& before) {
#pragma GCC unroll 1
  for (; steps > 0; --steps, a += TILE_STEP, b += TILE_STEP) {
    before();
    tile_load<4>(a, 64), tile_load<6>(b, SUMS_ROW);
    tile_dot<INT8, 0, 4, 6>();
    tile_load<7>(b + TILE, SUMS_ROW);
    tile_dot<INT8, 1, 4, 7>();
    if constexpr (ROWS > 1) {
      tile_load<5>(a + TILE_WORDS, 64);
      tile_dot<INT8, 2, 5, 6>(), tile_dot<INT8, 3, 5, 7>();
    }
  }
}

// One tile of A: rows [0, 16) of words from k on, where element (i, k) is at src + i * i_stride + k * k_stride, one of which is 1,
// `rows` of i and `depth` of k exist. Reader: StoredPairs of simd_types.h, or what reads other elements as pairs.
template <class Reader, class T>
FM_INLINE void pack_tile(const T* src, int64_t i_stride, int64_t k_stride, int64_t rows, int64_t k,
                         int64_t depth, float* out, const Scales& scales) {
  constexpr int STEP = Reader::STEP;
  vf tile[TILE];
  if (k_stride == 1) {
#pragma GCC unroll 16
    for (int r = 0; r < TILE; ++r)
      tile[r] = r < rows ? along_k<Reader>(src + r * i_stride + STEP * k, depth - STEP * k,
                                           scales_from(scales, r))
                         : vf{};
  } else {
    const int lanes = static_cast<int>(rows < 0 ? 0 : min(rows, TILE));
#pragma GCC unroll 16
    for (int w = 0; w < TILE; ++w) {
      const int64_t at = STEP * (k + w);
      tile[w] = across_k<Reader>(src + at * k_stride, k_stride, depth - at, lanes, scales);
    }
    transpose(tile);
  }
#pragma GCC unroll 16
  for (int r = 0; r < TILE; ++r) store_aligned(out + r * TILE, tile[r]);
}

// Rows [0, 32) of A over `depth` of k, in whole steps.
template <class Reader = StoredPairs, class T>
static __attribute__((noinline)) void pack_tiles(const T* src, int64_t i_stride, int64_t k_stride,
                                                 int64_t rows, int64_t depth, float* out,
                                                 const Scales& scales = {}) {
  constexpr int STEP = Reader::STEP;
  for (int64_t k = 0; STEP * k < depth; k += TILE, out += TILE_STEP) {
    for (int64_t i = 0; k_stride == 1 && i < min(TILE_COLUMNS, rows - TILE_COLUMNS); ++i) {
      prefetch(src + (TILE_COLUMNS + i) * i_stride +
               STEP * k);  // rows of the next panel: too many and too short for the hardware
    }
    for (int64_t i = 0; k_stride != 1 && i < min(STEP * TILE, depth - STEP * (k + TILE)); ++i) {
      prefetch(src + (STEP * (k + TILE) + i) * k_stride);
    }
    pack_tile<Reader>(src, i_stride, k_stride, rows, k, depth, out, scales);
    pack_tile<Reader>(src + TILE * i_stride, i_stride, k_stride, rows - TILE, k, depth,
                      out + TILE_WORDS, scales_from(scales, TILE));
  }
}

}  // namespace fm::FM_TARGET
#else
#define FM_LEAVE_TO_BASE(dtype, name, ...)
namespace fm::FM_TARGET {
FM_INLINE void tiles_begin() {}
FM_INLINE void tiles_end() {}
}  // namespace fm::FM_TARGET
#endif
