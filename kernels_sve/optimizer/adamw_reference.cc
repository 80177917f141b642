// Scalar reference of adamw.h, in double within a step.
#include <cmath>
#include <cstring>

#include "optimizer/adamw_rounding.h"
#include "reference.h"

namespace fm::reference {
namespace {

// Element i of v >= 0, in BF16 rounded by the word of its place in the global tensor.
void put_square(Moment moment, int64_t i, float v, const RoundingArgs& a) {
  if (moment.dtype == DType::f32 || std::isnan(v)) return put(moment.data, moment.dtype, i, v);
  const int64_t place = a.first + i,
                element = a.offset + place / a.columns * a.row + place % a.columns;
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  bits = (bits + rounding_word(static_cast<uint32_t>(element), {a.k0, a.k1})) >> 16;
  static_cast<bf16*>(moment.data)[i] = {static_cast<uint16_t>(bits)};
}

}  // namespace

void adamw(float* param, const float* grad, Moment exp_avg, Moment exp_avg_sq, void* copy,
           DType copy_dtype, int64_t n, const AdamWArgs& a) {
  for (int64_t i = 0; i < n; ++i) {
    const double g = static_cast<double>(grad[i]) * a.grad_scale;
    const float m_old = get(exp_avg.data, exp_avg.dtype, i);
    const double m = m_old + (g - m_old) * a.one_minus_beta1;
    const double v_old = get(exp_avg_sq.data, exp_avg_sq.dtype, i);
    const double v = v_old * a.beta2 + g * g * a.one_minus_beta2;
    const double p = static_cast<double>(param[i]) * a.decay -
                     a.step_size * m / (std::sqrt(v) * a.inverse_sqrt_correction + a.eps);
    put(exp_avg.data, exp_avg.dtype, i, static_cast<float>(m));
    put_square(exp_avg_sq, i, static_cast<float>(v), a.rounding);
    param[i] = static_cast<float>(p);
    if (copy) put(copy, copy_dtype, i, param[i]);
  }
}

}  // namespace fm::reference
