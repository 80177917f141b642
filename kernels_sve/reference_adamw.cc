// Scalar reference of adamw.h, in double within a step.
#include <cmath>

#include "reference.h"

namespace fm::reference {

void adamw(float* param, const float* grad, float* exp_avg, float* exp_avg_sq, void* copy, DType copy_dtype, int64_t n,
           const AdamWArgs& a) {
  for (int64_t i = 0; i < n; ++i) {
    const double g = static_cast<double>(grad[i]) * a.grad_scale;
    const double m = exp_avg[i] + (g - exp_avg[i]) * a.one_minus_beta1;
    const double v = static_cast<double>(exp_avg_sq[i]) * a.beta2 + g * g * a.one_minus_beta2;
    const double p =
        static_cast<double>(param[i]) * a.decay - a.step_size * m / (std::sqrt(v) * a.inverse_sqrt_correction + a.eps);
    exp_avg[i] = static_cast<float>(m);
    exp_avg_sq[i] = static_cast<float>(v);
    param[i] = static_cast<float>(p);
    if (copy) put(copy, copy_dtype, i, param[i]);
  }
}

}  // namespace fm::reference
