// Scalar reference of decode.h, in double.
#include "reference.h"

namespace fm::reference {

namespace {

float weight_element(const FewRowsArgs& a, int64_t j, int64_t p) {
  if (!a.scales) return get(a.weight, a.dtype, j * a.weight_row + p);
  return q8_element(static_cast<const int8_t*>(a.weight) + j * a.weight_row + p, a.scales, j, p);
}

}  // namespace

void linear_few_rows(const FewRowsArgs& a) {
  for (int64_t i = 0; i < a.m; ++i) {
    for (int64_t j = 0; j < a.n; ++j) {
      double v = a.bias ? get(a.bias, a.dtype, j) : 0;
      for (int64_t p = 0; p < a.k; ++p)
        v += double(get(a.x, a.dtype, i * a.x_row + p)) * weight_element(a, j, p);
      put(a.out, a.dtype, i * a.out_row + j, static_cast<float>(activation(a.activation, v)));
    }
  }
}

}  // namespace fm::reference
