// Scalar references of q8.h.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "reference.h"

namespace fm::reference {

float rounded(float value, DType dtype) {
  uint32_t memory;
  put(&memory, dtype, 0, value);
  return get(&memory, dtype, 0);
}

float q8_element(const int8_t* value, const Q8Scales& scales, int64_t row, int64_t column) {
  return *value * get(scales.at, DType::bf16, row * scales.row + column / Q8_BLOCK);
}

namespace {

// x / 127 as float, then to the next bfloat16 that is not below it.
float scale_of(float most) {
  const float quotient = most / 127.0f, nearest = rounded(quotient, DType::bf16);
  if (nearest >= quotient) return nearest;
  uint32_t bits;
  std::memcpy(&bits, &nearest, sizeof bits);
  bits += 1u << 16;
  float next;
  std::memcpy(&next, &bits, sizeof next);
  return next;
}

}  // namespace

void quantize_q8(const Q8Args& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t first = 0; first < a.cols; first += Q8_BLOCK) {
      const int64_t end = std::min(a.cols, first + Q8_BLOCK);
      float most = 0;
      bool finite = true;
      for (int64_t i = first; i < end; ++i) {
        const float x = std::fabs(get(a.weight, a.dtype, r * a.weight_row + i));
        finite = finite && x <= FLT_MAX;
        most = std::max(most, x);
      }
      const bool zero = most < 0x1p-100f;
      const float scale = !finite ? std::nanf("") : zero ? 0 : scale_of(most);
      put(a.scales, DType::bf16, r * q8_blocks(a.cols) + first / Q8_BLOCK, scale);
      for (int64_t i = first; i < end; ++i) {
        const float x = get(a.weight, a.dtype, r * a.weight_row + i);
        a.values[r * a.cols + i] =
            finite && !zero ? static_cast<int8_t>(std::nearbyint(x * (1.0f / scale))) : 0;
      }
    }
  }
}

void dequantize_q8(const Q8Args& a) {
  const Q8Scales scales = {a.scales, q8_blocks(a.cols)};
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t i = 0; i < a.cols; ++i)
      put(a.weight, a.dtype, r * a.weight_row + i,
          q8_element(a.values + r * a.cols + i, scales, r, i));
  }
}

}  // namespace fm::reference
