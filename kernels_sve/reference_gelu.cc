// Scalar reference of gelu.h, in double.
#include <cmath>

#include "reference.h"

namespace fm::reference {

void gelu(const void* x, int64_t x_row, const void* bias, void* y, DType dtype, int64_t rows, int64_t cols) {
  const double scale = std::sqrt(2 / std::acos(-1.0));
  for (int64_t i = 0; i < rows * cols; ++i) {
    const double v = get(x, dtype, i / cols * x_row + i % cols) + (bias ? get(bias, dtype, i % cols) : 0);
    put(y, dtype, i, static_cast<float>(0.5 * v * (1 + std::tanh(scale * (v + 0.044715 * v * v * v)))));
  }
}

}  // namespace fm::reference
