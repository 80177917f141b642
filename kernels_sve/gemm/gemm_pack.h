// Packing a slice of a matrix into a panel [k][WIDTH] of words for the micro-kernel. The panel index i runs over rows
// of A or columns of B. Lanes beyond the matrix are 0. A panel is written in order of rising address and may spill a
// vector over its end, so panels are packed from the first to the last and the buffer has VL words to spare.
#pragma once
#include "gemm/gemm_half.h"
#include "simd/transpose.h"

namespace fm::FM_TARGET {

// VL words of each of VL rows from word k on, as columns of a panel; src is row 0, and out where its first word goes. WHOLE: all of
// them exist. `used` rows belong to the panel, of which `valid` exist.
template <class Words, int WIDTH, bool WHOLE, class T>
FM_INLINE void pack_block(const T* src, int64_t stride, int64_t used, int64_t valid,
                          int64_t elements, int columns, Scales scales, float* out) {
  vf block[VL];
#pragma GCC unroll 32
  for (int i = 0; i < VL; ++i) {
    // Of the next panel: rows are too many and too short for the hardware to see their streams.
    if (WHOLE || (i < used && i + WIDTH < valid)) prefetch(src + (i + WIDTH) * stride);
    block[i] = WHOLE || (i < used && i < valid)
                   ? along_k<Words>(src + i * stride, WHOLE ? VL * Words::STEP : elements,
                                    scales_from(scales, i))
                   : vf{};
  }
  transpose(block);
#pragma GCC unroll 32
  for (int i = 0; i < VL; ++i) {
    if (WHOLE || i < columns) store(out + i * WIDTH, block[i]);
  }
  if constexpr (CORRECTS<Words>) {
    constexpr int CHAINS = VL < 4 ? VL : 4;
    vi sums[CHAINS] = {};
#pragma GCC unroll 32
    for (int i = 0; i < VL; ++i) sums[i % CHAINS] = Words::add_bytes(sums[i % CHAINS], block[i]);
    for (int c = 1; c < CHAINS; ++c) sums[0] += sums[c];
    Words::add_correction(sums[0], scales.correction);
  }
}

// Element (i, k) at src + i * stride + k; `valid` values of i exist. Whole blocks go along the rows, without a choice in between.
template <class Words, int WIDTH, class T>
FM_INLINE void pack_transposed(const T* src, int64_t stride, int64_t valid, int64_t depth,
                               Scales scales, float* out) {
  constexpr int GROUPS = (WIDTH + VL - 1) / VL, STEPS = VL * Words::STEP;
  const int64_t words = words_of<Words>(depth),
                whole = WIDTH % VL == 0 && valid >= WIDTH ? depth / STEPS * VL : 0;
  for (int g = 0; g < GROUPS; ++g) {
    for (int64_t k = 0; k < whole; k += VL) {
      pack_block<Words, WIDTH, true>(src + g * VL * stride + k * Words::STEP, stride, VL, VL, STEPS,
                                     VL, scales_from(scales, g * VL), out + k * WIDTH + g * VL);
    }
  }
  for (int64_t k = whole; k < words; k += VL) {
    const int columns = words - k < VL ? static_cast<int>(words - k) : VL;
    for (int g = GROUPS - 1; g >= 0;
         --g) {  // the last first: what it spills over is then overwritten
      pack_block<Words, WIDTH, false>(
          src + g * VL * stride + k * Words::STEP, stride, WIDTH - g * VL, valid - g * VL,
          depth - k * Words::STEP, columns, scales_from(scales, g * VL), out + k * WIDTH + g * VL);
    }
  }
}

// The same where a word holds two neighbouring i: pairs of k of the even and of the odd i are transposed, then exchange
// halves.
template <class Words, int WIDTH, class T>
FM_INLINE void pack_transposed_pairs(const T* src, int64_t stride, int64_t valid, int64_t depth,
                                     float* out) {
  constexpr int ROW = WIDTH / 2, GROUPS = (ROW + VL - 1) / VL;
  for (int64_t k = 0; k < depth; k += 2 * VL) {
    const int64_t columns = depth - k;
    for (int g = GROUPS - 1; g >= 0; --g) {
      vf block[2][VL];
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
#pragma GCC unroll 32
        for (int i = 0; i < VL; ++i) {
          const int64_t row = 2 * (g * VL + i) + odd;
          const T* p = src + row * stride + k;
          if (i < ROW - g * VL && row + WIDTH < valid) prefetch(p + WIDTH * stride);
          block[odd][i] = i < ROW - g * VL && row < valid ? Words::along_k(p, columns) : vf{};
        }
        transpose(block[odd]);
      }
      float* p = out + k * ROW + g * VL;
#pragma GCC unroll 32
      for (int i = 0; i < VL; ++i) {
        const vu even = (vu)block[0][i], odd = (vu)block[1][i];
        if (2 * i < columns) store(p + 2 * i * ROW, (vf)((even & 0xffffu) | odd << 16));
        if (2 * i + 1 < columns)
          store(p + (2 * i + 1) * ROW, (vf)(even >> 16 | (odd & 0xffff0000u)));
      }
    }
  }
}

// Element (i, k) at src + i + k * stride, PANELS neighbouring panels at once so that whole cache lines of a row are
// used.
template <class Words, int WIDTH, int PANELS, class T>
FM_INLINE void pack_straight(const T* src, int64_t stride, int64_t valid, int64_t depth,
                             Scales scales, float* out) {
  constexpr int ROW = WIDTH / Words::WIDE, GROUPS = (ROW + VL - 1) / VL, LANES = VL * Words::WIDE;
  constexpr int AHEAD = Tuning::PACK_AHEAD * Words::STEP;
  const int64_t words = words_of<Words>(depth), panel = panel_words<Words>(depth) * ROW;
  const bool inside = valid >= (PANELS - 1) * WIDTH + GROUPS * LANES;
  [[maybe_unused]] vi sums[PANELS][GROUPS] = {};
  for (int64_t k = 0; k < words * Words::STEP;
       k += Words::STEP, src += Words::STEP * stride, out += ROW) {
    const bool near_end = (words - k / Words::STEP) * ROW < GROUPS * VL;
    if (k + AHEAD <
        depth) {  // every line: a stride of whole pages has them in few sets of L2, which lose them to L3
#pragma GCC unroll 2
      for (int row = 0; row < Words::STEP; ++row) {
#pragma GCC unroll 32
        for (int64_t i = 0; i < PANELS * WIDTH; i += Tuning::LINE / int64_t(sizeof(T)))
          prefetch(src + (AHEAD + row) * stride + i);
      }
    }
#pragma GCC unroll 8
    for (int q = 0; q < PANELS; ++q) {
#pragma GCC unroll 8
      for (int g = 0; g < GROUPS; ++g) {
        const int64_t i = q * WIDTH + g * LANES, left = valid - i;
        const int lanes = inside || left >= LANES ? LANES : left > 0 ? static_cast<int>(left) : 0;
        const vf words = across_k<Words>(src + i, stride, depth - k, lanes, scales_from(scales, i));
        if constexpr (CORRECTS<Words>) sums[q][g] = Words::add_bytes(sums[q][g], words);
        float* p = out + q * panel + g * VL;
        constexpr int REST = ROW - (GROUPS - 1) * VL;
        if (REST < VL && g == GROUPS - 1 &&
            near_end) {  // or it would spill into a panel already begun
          store_n(p, words, REST);
        } else {
          store(p, words);
        }
      }
    }
  }
  if constexpr (CORRECTS<Words>) {
    for (int q = 0; q < PANELS; ++q) {
      for (int g = 0; g < GROUPS; ++g)
        Words::add_correction(sums[q][g], scales.correction + q * WIDTH + g * VL);
    }
  }
}

constexpr int PACK_PANELS = Tuning::PACK_PANELS;

template <class Words, int WIDTH, class T>
static int pack_as_stored(const T* src, int64_t i_stride, int64_t k_stride, int64_t left,
                          int64_t valid, int64_t depth, Scales scales, float* out) {
  if (i_stride != 1) {
    if constexpr (Words::WIDE == 1) {
      pack_transposed<Words, WIDTH>(src, i_stride, valid, depth, scales, out);
    } else {
      pack_transposed_pairs<Words, WIDTH>(src, i_stride, valid, depth, out);
    }
    return 1;
  }
  if (left >= PACK_PANELS * WIDTH) {
    pack_straight<Words, WIDTH, PACK_PANELS>(src, k_stride, valid, depth, scales, out);
    return PACK_PANELS;
  }
  pack_straight<Words, WIDTH, 1>(src, k_stride, valid, depth, scales, out);
  return 1;
}

// The panel that begins at src, or PACK_PANELS of them; returns how many it packed, given that `left` values of i are wanted
// and `valid` exist. scales: from the first of them on, where Words are INT8.
template <class Words, int WIDTH, bool IS_A, class T>
FM_INLINE int pack_panels(const T* src, int64_t i_stride, int64_t k_stride, int64_t left,
                          int64_t valid, int64_t depth, Scales scales, float* out) {
  int packed = 0;
  for_parts<Words, IS_A>(scales, [&](auto reader, int p) FM_INLINE_LAMBDA {
    float* part = out + p * words_of<Words>(depth) * (WIDTH / Words::WIDE);
    packed = pack_as_stored<decltype(reader), WIDTH>(src, i_stride, k_stride, left, valid, depth,
                                                     scales, part);
  });
#ifdef FM_HAS_BF16_QUADS
  if constexpr (Words::BESIDE == 2) words_beside<WIDTH>(out, packed * panel_words<Words>(depth));
#endif
  return packed;
}

// Panels of B: [begin, end) of the index i, of which there are `count` in all; src is element (begin, 0).
template <class Words, int WIDTH, class T>
FM_INLINE void pack(const T* src, int64_t i_stride, int64_t k_stride, int64_t begin, int64_t end,
                    int64_t count, int64_t depth, float* out, Scales scales = {}) {
  const int64_t panel = panel_words<Words>(depth) * (WIDTH / Words::WIDE);
  for (int64_t i = begin; i < end;) {
    const int packed = pack_panels<Words, WIDTH, false>(src, i_stride, k_stride, end - i, count - i,
                                                        depth, scales, out);
    i += packed * WIDTH;
    if constexpr (Words::INT8) scales = scales_from(scales, packed * WIDTH);
    src += packed * WIDTH * i_stride;
    out += packed * panel;
  }
}

}  // namespace fm::FM_TARGET
