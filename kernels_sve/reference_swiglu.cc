// Scalar references of swiglu.h, in double.
#include <cmath>

#include "reference.h"

namespace fm::reference {

void swiglu(const SwiGLUArgs& a, void* y) {
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t c = 0; c < a.cols; ++c) {
      const double gate = get(a.x, a.dtype, r * a.x_row + c), up = get(a.x, a.dtype, r * a.x_row + a.x_part + c);
      put(y, a.dtype, r * a.cols + c, static_cast<float>(gate / (1 + std::exp(-gate)) * up));
    }
  }
}

void swiglu_backward(const SwiGLUArgs& a, const SwiGLUGradArgs& grad) {
  for (int64_t r = 0; r < a.rows; ++r) {
    for (int64_t c = 0; c < a.cols; ++c) {
      const double gate = get(a.x, a.dtype, r * a.x_row + c), up = get(a.x, a.dtype, r * a.x_row + a.x_part + c);
      const double dy = get(grad.dy, a.dtype, r * a.cols + c), sigma = 1 / (1 + std::exp(-gate));
      const int64_t at = r * grad.dx_row + c;
      put(grad.dx, a.dtype, at, static_cast<float>(dy * up * sigma * (1 + gate * (1 - sigma))));
      put(grad.dx, a.dtype, at + grad.dx_part, static_cast<float>(dy * gate * sigma));
    }
  }
}

}  // namespace fm::reference
