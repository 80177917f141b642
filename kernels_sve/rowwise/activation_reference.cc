// Scalar reference of activation.h, in double, and the formulas of activations for the other references.
#include <cmath>

#include "reference.h"

namespace fm::reference {
namespace {

const double TWO_OVER_ROOT = 2 * std::sqrt(2 / std::acos(-1.0));  // 2 sqrt(2 / pi)

// f(x) / x; not of squared_relu.
double share(Activation f, double x) {
  if (f == Activation::silu) return 1 / (1 + std::exp(-x));
  if (f == Activation::gelu) return 1 / (1 + std::exp(-TWO_OVER_ROOT * (x + 0.044715 * x * x * x)));
  return std::erfc(-x / std::sqrt(2.0)) / 2;
}

}  // namespace

double activation(Activation f, double x) {
  if (f == Activation::none) return x;
  if (f == Activation::squared_relu) return x < 0 ? 0 : x * x;
  return x * share(f, x);
}

double activation_slope(Activation f, double x) {
  if (f == Activation::squared_relu) return x < 0 ? 0 : 2 * x;
  const double s = share(f, x);
  if (f == Activation::gelu_exact) {
    const double density = std::exp(-x * x / 2) * TWO_OVER_ROOT / 4;
    return s + (density == 0 ? density : x * density);
  }
  const double t = s * (1 - s),
               growth = f == Activation::silu ? 1 : TWO_OVER_ROOT * (1 + 3 * 0.044715 * x * x);
  return s + (t == 0 ? t : x * growth * t);
}

void activate(const ActivationArgs& a) {
  for (int64_t i = 0; i < a.rows * a.cols; ++i) {
    const double v = get(a.x, a.dtype, i / a.cols * a.x_row + i % a.cols) +
                     (a.bias ? get(a.bias, a.dtype, i % a.cols) : 0);
    put(a.y, a.dtype, i, static_cast<float>(activation(a.activation, v)));
  }
}

void activate_backward(const ActivationArgs& a, const void* dy) {
  for (int64_t i = 0; i < a.rows * a.cols; ++i) {
    const double x = get(a.x, a.dtype, i / a.cols * a.x_row + i % a.cols);
    put(a.y, a.dtype, i,
        static_cast<float>(get(dy, a.dtype, i) * activation_slope(a.activation, x)));
  }
}

}  // namespace fm::reference
