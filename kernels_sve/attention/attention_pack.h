// Packed forms of a head's matrices X (s, d), rows of T in the caller's tensor, for attention_tile.h. Rows before begin, rows from s
// on and columns from d on are zeros. W = words, d / STEP or s / STEP of them along the summed dimension.
//
//   crosswise   [s / VL][d words][VL]      a for sums over d: transposed VL rows at a time
//   lanewise    [d words][LANES]           b for sums over d: the same with LANES rows side by side
//   columnwise  [d / MR][s words][MR]      a for sums over s
//
// Where a is an operand of tiles, crosswise and columnwise are panels of 32 rows of its own form (tiles.h).
//
// unpack turns a transposed result [d][LANES] into rows again. Tested by tests/kernels/test_attention.py.
#pragma once
#include "attention/attention_tile.h"

namespace fm::FM_TARGET {

FM_INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// A head's matrix inside a tensor, rows [begin, s) of it: row r begins at data + r * stride.
template <class T>
struct Rows {
  T* data;
  int64_t stride, s, d, begin = 0;
  T* row(int64_t r) const { return data + r * stride; }
  bool has(int64_t r) const { return r >= begin && r < s; }
};

// Words [w, w + VL) of a row, as bits in float lanes; beyond d zeros.
template <class P, class T>
FM_INLINE vf row_words(const T* row, int64_t w, int64_t d) {
  const int lanes = static_cast<int>(min(VL, d / P::STEP - w));
  if (lanes <= 0) return vf{};
  if constexpr (P::STEP == 1) {
    return load_lanes(row + w, lanes);
  } else {
    return load_lanes(reinterpret_cast<const float*>(row) + w, lanes);
  }
}

// Rows [first, first + VL) transposed to out[w * ld + lane] for w < words.
template <class P, class T>
FM_INLINE void pack_rows(const Rows<const T>& x, int64_t first, float* out, int64_t ld,
                         int64_t words) {
  for (int64_t w = 0; w < words; w += VL) {
    vf tile[VL];
#pragma GCC unroll 16
    for (int r = 0; r < VL; ++r) {
      if (first + r + VL < x.s) prefetch(x.row(first + r + VL) + w * P::STEP);
      tile[r] = x.has(first + r) ? row_words<P>(x.row(first + r), w, x.d) : vf{};
    }
    transpose(tile);
    float* to = out + w * ld;
    if (w + VL <= words) {
#pragma GCC unroll 16
      for (int c = 0; c < VL; ++c) store(to + c * ld, tile[c]);
    } else {
      for (int c = 0; c < words - w; ++c) store(to + c * ld, tile[c]);
    }
  }
}

#ifdef FM_HAS_TILES
// Rows [begin, end) of x in this thread's memory, with zeros before x.begin, because a panel is read from its first row on.
template <class T>
static Rows<const T> with_zeros(const Rows<const T>& x, int64_t begin, int64_t end) {
  T* copy = static_cast<T*>(scratch(3, static_cast<size_t>((end - begin) * x.d) * sizeof(T)));
  for (int64_t r = begin; r < end; ++r) {
    T* to = copy + (r - begin) * x.d;
    x.has(r) ? __builtin_memcpy(to, x.row(r), static_cast<size_t>(x.d) * sizeof(T))
             : __builtin_memset(to, 0, static_cast<size_t>(x.d) * sizeof(T));
  }
  return {copy - begin * x.d, x.d, x.s, x.d, begin};
}
#endif

template <class P, class T>
static void pack_crosswise(const Rows<const T>& x, int64_t begin, int64_t end,
                           typename P::Word* out, int64_t words) {
#ifdef FM_HAS_TILES
  if (begin < x.begin) return pack_crosswise<P>(with_zeros(x, begin, end), begin, end, out, words);
  for (int64_t r = begin; r < end; r += P::PANEL_ROWS) {
    pack_tiles(x.row(r), x.stride, 1, x.s - r, x.d, reinterpret_cast<float*>(out) + r * words);
  }
#else
  for (int64_t r = begin; r < end; r += VL) {
    pack_rows<P>(x, r, reinterpret_cast<float*>(out) + r * words, VL, words);
  }
#endif
}

template <class P, class T>
static void pack_lanewise(const Rows<const T>& x, int64_t first, typename P::Word* out,
                          int64_t words) {
  for (int v = 0; v < ATTENTION_NV; ++v) {
    pack_rows<P>(x, first + v * VL, reinterpret_cast<float*>(out) + v * VL, LANES, words);
  }
}

// Columns [c, c + VL) of row r, or of rows r and r + 1 as pairs.
template <class P, class T>
FM_INLINE vf column_words(const Rows<const T>& x, int64_t r, int64_t c) {
  const int lanes = static_cast<int>(min(VL, x.d - c));
  if (r >= x.s || lanes <= 0) return vf{};
  if constexpr (P::STEP == 1) {
    return x.has(r) ? load_lanes(x.row(r) + c, lanes) : vf{};
  } else {
    const vu low = x.has(r) ? load_u16_n(&x.row(r)[c].bits, lanes) : vu{};
    return (vf)(x.has(r + 1) ? low | load_u16_n(&x.row(r + 1)[c].bits, lanes) << 16 : low);
  }
}

// Rows [begin, end); panel = words from one panel to the next.
template <class P, class T>
static void pack_columnwise(const Rows<const T>& x, int64_t begin, int64_t end,
                            typename P::Word* out, int64_t columns, int64_t panel) {
#ifdef FM_HAS_TILES
  if (begin < x.begin)
    return pack_columnwise<P>(with_zeros(x, begin, end), begin, end, out, columns, panel);
  for (int64_t c = 0; c < columns; c += P::PANEL_ROWS) {
    float* to =
        reinterpret_cast<float*>(out) + c / P::PANEL_ROWS * panel + begin / P::STEP * P::PANEL_ROWS;
    pack_tiles(x.row(begin) + c, 1, x.stride, x.d - c, min(end, x.s) - begin, to);
  }
#else
  for (int64_t r = begin; r < end; r += P::STEP) {
    for (int64_t c = 0; c < columns; c += VL) {
      for (int i = 0; i < P::STEP; ++i) {
        if (r + i + VL < x.s) prefetch(x.row(r + i + VL) + c);
      }
      const vf words = column_words<P>(x, r, c);
      float* to =
          reinterpret_cast<float*>(out) + c / ATTENTION_MR * panel + r / P::STEP * ATTENTION_MR;
#pragma GCC unroll 4
      for (int q = 0; q < VL / ATTENTION_MR; ++q) {
        if (c + q * ATTENTION_MR < columns) store_part<ATTENTION_MR>(to + q * panel, words, q);
      }
    }
  }
#endif
}

// Rows [first, first + VL) of x = factor * transposed(in[d][LANES], its VL lanes from `in` on), factor(lane) a vector; or += with ADD.
template <bool ADD = false, class T>
FM_INLINE void unpack_rows(const float* in, int64_t first, const Rows<T>& x, vf factor) {
  for (int64_t c = 0; c < x.d; c += VL) {
    const int lanes = static_cast<int>(min(VL, x.d - c));
    vf tile[VL];
#pragma GCC unroll 16
    for (int r = 0; r < VL; ++r) {
      if (first + r + VL < x.s) prefetch_write(x.row(first + r + VL) + c);
      tile[r] = r < lanes ? load(in + (c + r) * LANES) * factor : vf{};
    }
    transpose(tile);
    const int rows = static_cast<int>(min(VL, x.s - first));
#pragma GCC unroll 16
    for (int r = 0; r < VL; ++r) {
      if (r >= rows || first + r < x.begin) continue;
      if (ADD) tile[r] += load_lanes(x.row(first + r) + c, lanes);
      store_lanes(x.row(first + r) + c, tile[r], lanes);
    }
  }
}

}  // namespace fm::FM_TARGET
