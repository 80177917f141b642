// AdamW over flat buffers in one pass over memory (Loshchilov and Hutter, ICLR 2019; the order of operations of
// torch.optim.AdamW):
//   g = grad * grad_scale
//   m += (g - m) (1 - beta1)
//   v = beta2 v + (1 - beta2) g^2
//   param = param (1 - lr * weight_decay) - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)
// and, when asked for, a low-precision copy of param. All in FP32; m and v are stored in FP32 or BF16, the update uses them before
// they are rounded: m to nearest even, v as adamw_rounding.h says.
// Reference: adamw_reference.cc. Tested by tests/kernels/test_adamw.py.
#pragma once
#include "optimizer/adamw_rounding.h"
#include "simd/simd.h"

namespace fm::FM_TARGET {

// Runs body(i, stop, number of element i) for the parts of [begin, end) in which the elements' numbers follow one another.
template <class F>
FM_INLINE void for_consecutive(int64_t begin, int64_t end, const RoundingArgs& a, const F& body) {
  for (int64_t i = begin; i < end;) {
    const int64_t row = (a.first + i) / a.columns, column = (a.first + i) % a.columns;
    const int64_t stop = min(end, i + a.columns - column);
    body(i, stop, a.offset + row * a.row + column);
    i = stop;
  }
}

// element: the number of the first lane's.
FM_INLINE void store_square(float* p, vf v, int lanes, int64_t, const RoundingArgs&) {
  store_lanes(p, v, lanes);
}
FM_INLINE void store_square(bf16* p, vf v, int lanes, int64_t element, const RoundingArgs& a) {
  const vu words = rounding_word(lane_index() + static_cast<uint32_t>(element), {a.k0, a.k1});
  const vu bits = float_to_bf16_by(v, words);
  lanes == VL ? store_u16(&p->bits, bits) : store_u16_n(&p->bits, bits, lanes);
}

// element: the number of element `begin`. M, V: float or bf16.
template <class M, class V, class T>
FM_INLINE void adamw_range(float* param, const float* grad, M* exp_avg, V* exp_avg_sq, T* copy,
                           int64_t begin, int64_t end, int64_t element, const AdamWArgs& f) {
  for_vector_groups<CHAINS>(begin, end, [&](auto count, int64_t first, int lanes) FM_INLINE_LAMBDA {
    constexpr int N = decltype(count)::value;
    vf m[N], v[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      const int64_t i = first + n * VL;
      const vf g = load_lanes(grad + i, lanes) * f.grad_scale;
      const vf m_old = load_lanes(exp_avg + i, lanes);
      m[n] = m_old + (g - m_old) * f.one_minus_beta1;
      v[n] = load_lanes(exp_avg_sq + i, lanes) * f.beta2 + g * g * f.one_minus_beta2;
      store_exact(exp_avg + i, m[n], lanes);
      store_square(exp_avg_sq + i, v[n], lanes, element + i - begin, f.rounding);
    }
    sqrt_each(v);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) v[n] = v[n] * f.inverse_sqrt_correction + f.eps;
    reciprocal_each(v);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      const int64_t i = first + n * VL;
      const vf p = load_lanes(param + i, lanes) * f.decay - m[n] * f.step_size * v[n];
      store_lanes(param + i, p, lanes);
      if (copy) store_exact(copy + i, p, lanes);  // as `convert` makes it from a checkpoint
    }
  });
}

template <class M, class V, class T>
static void adamw_of(float* param, const float* grad, M* exp_avg, V* exp_avg_sq, T* copy, int64_t n,
                     const AdamWArgs& f) {
  parallel_for(n, Tuning::GRAIN, [&](int64_t first, int64_t last) {
    for_consecutive(first, last, f.rounding, [&](int64_t begin, int64_t end, int64_t element) {
      adamw_range(param, grad, exp_avg, exp_avg_sq, copy, begin, end, element, f);
    });
  });
}

// Calls f with a value of a moment's element type.
template <class F>
FM_INLINE void with_moment(DType dtype, const F& f) {
  dtype == DType::f32 ? f(float()) : f(bf16());
}

// copy may be null.
static void adamw(float* param, const float* grad, Moment exp_avg, Moment exp_avg_sq, void* copy,
                  DType copy_dtype, int64_t n, const AdamWArgs& args) {
  with_moment(exp_avg.dtype, [&](auto first) {
    with_moment(exp_avg_sq.dtype, [&](auto second) {
      with_dtype(copy_dtype, [&](auto element) {
        using M = decltype(first);
        using V = decltype(second);
        using T = decltype(element);
        adamw_of(param, grad, static_cast<M*>(exp_avg.data), static_cast<V*>(exp_avg_sq.data),
                 static_cast<T*>(copy), n, args);
      });
    });
  });
}

}  // namespace fm::FM_TARGET
