// Scalar references of reduce.h.
#include "reference.h"

namespace fm::reference {

double squared_norm(const void* x, DType dtype, int64_t n) {
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total += static_cast<double>(get(x, dtype, i)) * get(x, dtype, i);
  return total;
}

int64_t count_zeros(const void* x, DType dtype, int64_t n) {
  int64_t zeros = 0;
  for (int64_t i = 0; i < n; ++i) zeros += get(x, dtype, i) == 0;
  return zeros;
}

void sum_rows(const void* x, DType dtype, int64_t rows, int64_t cols, int64_t stride, void* out,
              DType out_dtype) {
  for (int64_t i = 0; i < cols; ++i) {
    float sum = get(x, dtype, i);
    for (int64_t row = 1; row < rows; ++row) sum += get(x, dtype, row * stride + i);
    put(out, out_dtype, i, sum);
  }
}

}  // namespace fm::reference
