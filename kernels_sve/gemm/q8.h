// Weights in eight bits: quantize_q8 and dequantize_q8. A block of Q8_BLOCK = 64 neighbouring numbers of a row has one scale,
//
//   scale = max |x| / 127, rounded up to bfloat16,   q = nearest(x / scale),   x ~ q scale
//
// so no value leaves [-127, 127]. A block whose largest magnitude is below 2^-100 is zeros with the scale 0; a block with a NaN or an
// infinity is zeros with the scale NaN, so every product with it is NaN. Reference: q8_reference.cc. Tested by
// tests/kernels/test_q8.py. Matmuls: gemm_q8.h, decode.h.
#pragma once
#include "gemm/magnitude_bits.h"
#include "gemm/q8_elements.h"

namespace fm::FM_TARGET {

struct Q8Scale {
  bf16 scale;
  float inverse;  // 0: the values are 0
};

// Of a block whose largest magnitude has these bits as a float. Not inline: in a loop the divisions would be vector instructions.
static __attribute__((noinline)) Q8Scale q8_scale_of(uint32_t bits) {
  if (bits >= INFINITY_BITS) return {{0x7fc0}, 0.0f};
  if (bits < SMALLEST_BITS) return {{0}, 0.0f};
  float most;
  __builtin_memcpy(&most, &bits, sizeof most);
  float scale = most / 127.0f;
  uint32_t up;
  __builtin_memcpy(&up, &scale, sizeof up);
  up = (up + 0xffffu) & 0xffff0000u;
  __builtin_memcpy(&scale, &up, sizeof scale);
  return {{static_cast<uint16_t>(up >> 16)}, 1.0f / scale};
}

template <class T>
FM_INLINE void quantize_block(const T* x, int64_t count, int8_t* values, bf16* scale) {
  vu most = {};
  for_vectors(0, count, [&](int64_t i, int lanes) {
    const vu bits = (vu)load_lanes(x + i, lanes) & 0x7fffffffu;
    most = bits > most ? bits : most;
  });
  uint32_t bits = 0;
  for (int lane = 0; lane < VL; ++lane) bits = bits > most[lane] ? bits : most[lane];
  const Q8Scale block = q8_scale_of(bits);
  *scale = block.scale;
  for_vectors(0, count, [&](int64_t i, int lanes) {
    const vi q = block.inverse ? to_int(load_lanes(x + i, lanes) * block.inverse) : vi{};
    store_i8_n(values + i, q, lanes);
  });
}

// Calls f(row) for the rows of a weight, and an element of its type.
template <class F>
FM_INLINE void for_q8_rows(const Q8Args& a, const F& f) {
  with_dtype(a.dtype, [&](auto element) {
    parallel_for(a.rows, 1 + Tuning::GRAIN / (a.cols + 1), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) f(r, element);
    });
  });
}

static void quantize_q8(const Q8Args& a) {
  for_q8_rows(a, [&](int64_t r, auto element) {
    const auto* row = static_cast<const decltype(element)*>(a.weight) + r * a.weight_row;
    bf16* scales = a.scales + r * q8_blocks(a.cols);
    for (int64_t i = 0; i < a.cols; i += Q8_BLOCK)
      quantize_block(row + i, min(Q8_BLOCK, a.cols - i), a.values + r * a.cols + i, scales++);
  });
}

static void dequantize_q8(const Q8Args& a) {
  for_q8_rows(a, [&](int64_t r, auto element) {
    auto* row = static_cast<decltype(element)*>(a.weight) + r * a.weight_row;
    dequantize_row(a.values + r * a.cols, a.scales + r * q8_blocks(a.cols), 0, a.cols, row);
  });
}

}  // namespace fm::FM_TARGET
