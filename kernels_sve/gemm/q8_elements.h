// Reading Q8 weights: int8 values with a bfloat16 scale for each Q8_BLOCK neighbouring numbers of a row, value * scale. The product
// has 15 bits, so it is exact in float32, and no denormal (q8.h makes no smaller scale than 2^-107).
#pragma once
#include "simd/simd.h"

namespace fm::FM_TARGET {

static_assert(Q8_BLOCK % VL == 0, "a block is whole vectors");

FM_INLINE vf q8_scale(const bf16* scale) {
  return (vf)broadcast(static_cast<uint32_t>(scale->bits) << 16);
}

FM_INLINE vf q8_values(const int8_t* q, int lanes) {
  return __builtin_convertvector(lanes == VL ? load_i8(q) : load_i8_n(q, lanes), vf);
}

// Runs body(i, lanes, scale) over elements [begin, end) of a row by vectors, none of which reaches into a second block.
template <class F>
FM_INLINE void for_q8_vectors(const bf16* scales, int64_t begin, int64_t end, const F& body) {
  for (int64_t i = begin; i < end;) {
    const int64_t block = i / Q8_BLOCK, block_end = min(end, (block + 1) * Q8_BLOCK);
    const vf scale = q8_scale(scales + block);
    for_vectors(i, block_end,
                [&](int64_t j, int lanes) FM_INLINE_LAMBDA { body(j, lanes, scale); });
    i = block_end;
  }
}

// out = elements [begin, end) of a row.
template <class T>
FM_INLINE void dequantize_row(const int8_t* values, const bf16* scales, int64_t begin, int64_t end,
                              T* out) {
  for_q8_vectors(scales, begin, end, [&](int64_t i, int lanes, vf scale) FM_INLINE_LAMBDA {
    store_lanes(out + (i - begin), q8_values(values + i, lanes) * scale, lanes);
  });
}

}  // namespace fm::FM_TARGET
