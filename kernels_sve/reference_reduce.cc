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

}  // namespace fm::reference
