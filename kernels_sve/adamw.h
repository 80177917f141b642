// AdamW over flat FP32 buffers in one pass over memory (Loshchilov and Hutter, ICLR 2019; the order of operations of
// torch.optim.AdamW):
//   g = grad * grad_scale
//   m += (g - m) (1 - beta1)
//   v = beta2 v + (1 - beta2) g^2
//   param = param (1 - lr * weight_decay) - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
// and, when asked for, a low-precision copy of param.
// Reference: reference_adamw.cc. Tested by tests/kernels/test_adamw.py.
#pragma once
#include "simd.h"

namespace fm::FM_TARGET {

template <class T>
static void adamw_of(float* param, const float* grad, float* exp_avg, float* exp_avg_sq, T* copy, int64_t n,
                     const AdamWArgs& f) {
  parallel_for(n, Tuning::GRAIN, [&](int64_t begin, int64_t end) {
    for_vectors(begin, end, [&](int64_t i, int lanes) {
      const vf g = load_lanes(grad + i, lanes) * f.grad_scale;
      const vf m_old = load_lanes(exp_avg + i, lanes);
      const vf m = m_old + (g - m_old) * f.one_minus_beta1;
      const vf v = load_lanes(exp_avg_sq + i, lanes) * f.beta2 + g * g * f.one_minus_beta2;
      const vf p = load_lanes(param + i, lanes) * f.decay -
                   m * f.step_size * reciprocal(sqrt(v) * f.inverse_sqrt_correction + f.eps);
      store_lanes(exp_avg + i, m, lanes);
      store_lanes(exp_avg_sq + i, v, lanes);
      store_lanes(param + i, p, lanes);
      if (copy) store_lanes(copy + i, p, lanes);
    });
  });
}

// copy may be null.
static void adamw(float* param, const float* grad, float* exp_avg, float* exp_avg_sq, void* copy, DType copy_dtype,
                  int64_t n, const AdamWArgs& args) {
  with_dtype(copy_dtype, [&](auto element) {
    using T = decltype(element);
    adamw_of(param, grad, exp_avg, exp_avg_sq, static_cast<T*>(copy), n, args);
  });
}

}  // namespace fm::FM_TARGET
