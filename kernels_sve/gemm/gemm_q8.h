// B as a Q8 weight. A strip of columns is dequantized into scratch memory as elements of A's type and packed from there, so a product has
// the bits of one with the dequantized weight, whatever the words of the panels. Included by gemm.h.
#pragma once
#include "gemm/gemm_pack.h"
#include "gemm/q8_elements.h"

namespace fm::FM_TARGET {

struct Span {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// B(k, n) of T, or of int8 with scales.
template <class T>
struct BOperand {
  const void* data;
  int64_t row, col;  // strides, of which one is 1
  Q8Scales scales;

  bool along_k() const { return row == 1; }
  int64_t element_bytes() const { return scales ? 1 : int64_t(sizeof(T)); }
  const char* at(int64_t p, int64_t j) const {
    return static_cast<const char*>(data) + (p * row + j * col) * element_bytes();
  }
  const T* element(int64_t p, int64_t j) const { return reinterpret_cast<const T*>(at(p, j)); }
  // Row i of a Q8 weight, which is column i of B if that is contiguous along k.
  const int8_t* values(int64_t i) const {
    return static_cast<const int8_t*>(data) + i * (along_k() ? col : row);
  }
  const bf16* scales_of(int64_t i) const { return scales.at + i * scales.row; }
};

// Rows [rows.begin, rows.end) of a Q8 weight at [columns.begin, columns.end), as rows of `stride` elements.
template <class T>
static void dequantize_strip(const BOperand<T>& b, Span rows, Span columns, int64_t stride,
                             T* out) {
  for (int64_t i = rows.begin; i < rows.end; ++i, out += stride)
    dequantize_row(b.values(i), b.scales_of(i), columns.begin, columns.end, out);
}

// Packs panels of the columns [columns.begin, columns.end), of which `count` exist, over `depth` of k from p on. scales: from
// the first of them on, where Words are INT8.
template <class Words, int COLUMNS, class T>
FM_INLINE void pack_b_panels(const BOperand<T>& b, Span columns, int64_t count, int64_t p,
                             int64_t depth, float* panels, Scales scales) {
  if (!b.scales)
    return pack<Words, COLUMNS>(b.element(p, columns.begin), b.col, b.row, columns.begin,
                                columns.end, count, depth, panels, scales);
  const int64_t width = b.along_k() ? COLUMNS : PACK_PANELS * COLUMNS,
                panel = panel_words<Words>(depth) * (COLUMNS / Words::WIDE);
  // Rows apart from each other by an odd number of lines, which do not meet in the same sets of a cache.
  constexpr int64_t LINE = Tuning::LINE / sizeof(T);
  const int64_t stride = b.along_k() ? ((depth + VL) / LINE | 1) * LINE + LINE : width;
  T* strip = static_cast<T*>(scratch(4, ((b.along_k() ? width : depth) * stride + VL) * sizeof(T)));
  for (int64_t j = columns.begin; j < columns.end; j += width) {
    const Span some = {j, min(j + width, min(columns.end, count))};
    const Span deep = {p, p + depth};
    b.along_k() ? dequantize_strip(b, some, deep, stride, strip)
                : dequantize_strip(b, deep, some, stride, strip);
    pack<Words, COLUMNS>(strip, b.along_k() ? stride : 1, b.along_k() ? 1 : stride, j,
                         min(j + width, columns.end), some.end, depth, panels, scales);
    panels += width / COLUMNS * panel;
    if constexpr (Words::INT8) scales = scales_from(scales, width);
  }
}

// Largest magnitude of elements that are rounded to T, from the largest before rounding: both have the same order.
template <class T>
FM_INLINE uint32_t rounded_bits(float most) {
  T rounded[1];
  store_n(rounded, broadcast(most), 1);
  const float value = load_scalar(rounded);
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits & 0x7fffffffu;
}

FM_INLINE vu larger_bits(vu a, vu b) { return a > b ? a : b; }

// The scales of columns of a quantized B over `depth` of k, contiguous along k or not: find_scales_along_k and find_scales_across_k of
// a Q8 weight's elements.
template <class T>
static void find_q8_scales(const BOperand<T>& b, Span columns, int64_t depth, Scales out) {
  if (b.along_k()) {
    for (int64_t j = columns.begin; j < columns.end; ++j, ++out.scale, ++out.inverse) {
      vu most = {};
      const int8_t* q = b.values(j);
      for_q8_vectors(b.scales_of(j), 0, depth, [&](int64_t i, int lanes, vf scale) {
        most = larger_bits(most, (vu)(q8_values(q + i, lanes) * scale) & 0x7fffffffu);
      });
      uint32_t bits = 0;
      for (int lane = 0; lane < VL; ++lane) bits = bits > most[lane] ? bits : most[lane];
      float value;
      __builtin_memcpy(&value, &bits, sizeof value);
      set_scale(rounded_bits<T>(value), out.scale, out.inverse);
    }
    return;
  }
  uint32_t* most = reinterpret_cast<uint32_t*>(out.inverse);
  for (int64_t j = 0; j < columns.size(); ++j) most[j] = 0;
  for (int64_t p = 0; p < depth; ++p) {
    const int8_t* q = b.values(p);
    for_q8_vectors(b.scales_of(p), columns.begin, columns.end, [&](int64_t j, int lanes, vf scale) {
      float* at = out.inverse + (j - columns.begin);
      const vu bits = (vu)(q8_values(q + j, lanes) * scale) & 0x7fffffffu;
      store_lanes(at, (vf)larger_bits(bits, (vu)load_lanes(at, lanes)), lanes);
    });
  }
  for (int64_t j = 0; j < columns.size(); ++j)
    set_scale(rounded_bits<T>(out.inverse[j]), out.scale + j, out.inverse + j);
}

// The scales of columns of B, of one sweep over memory in its order.
template <class T>
FM_INLINE void find_b_scales(const BOperand<T>& b, Span columns, int64_t depth, Scales out) {
  if (b.scales) return find_q8_scales(b, columns, depth, out);
  const T* first = b.element(0, columns.begin);
  b.along_k() ? find_scales_along_k(first, b.col, columns.size(), depth, out)
              : find_scales_across_k(first, b.row, columns.size(), depth, out, nullptr);
}

}  // namespace fm::FM_TARGET
