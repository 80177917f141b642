// Scalar references of elementwise.h.
#include <cmath>

#include "reference.h"

namespace fm::reference {
namespace {

double apply(Function function, double x) {
  switch (function) {
    case Function::exp:
      return std::exp(x);
    case Function::log:
      return std::log(x);
    case Function::sqrt:
      return std::sqrt(x);
    case Function::rsqrt:
      return 1 / std::sqrt(x);
    default:
      return 1 / x;
  }
}

}  // namespace

void elementwise(Function function, const float* x, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(apply(function, x[i]));
}

void convert(const void* x, DType from, void* out, DType to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) put(out, to, i, get(x, from, i));
}

}  // namespace fm::reference
