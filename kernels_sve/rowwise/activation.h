// Activations of an MLP, with the bias in front of them. Storage float32, bfloat16 or float16, arithmetic float32.
//   gelu(x) = x / 2 (1 + tanh(u)) = x sigma(2 u),   u = sqrt(2 / pi) (x + 0.044715 x^3)    (Hendrycks and Gimpel, 2016)
//   gelu_exact(x) = x Phi(x) = x sigma(x p(x^2)), Phi the normal distribution and p a polynomial: see EXACT_SHARE
//   squared_relu(x) = max(x, 0)^2                                                          (So et al., 2021)
//   silu(x) = x sigma(x), here alone: an MLP has it in its gate (gate.h)
// with sigma(v) = 1 / (1 + 2^(-v log2(e))). An MLP's derivative is part of the matmuls that it follows (gemm_epilogue.h).
// Reference: activation_reference.cc. Tested by tests/kernels/test_activation.py.
#pragma once
#include "rowwise/rowwise_blocks.h"

namespace fm::FM_TARGET {

constexpr float GELU_CUBE = 0.044715f;
constexpr float GELU_SCALE = 1.5957691216f;  // 2 sqrt(2 / pi)

// f(x) = x sigma(x p(x^2)). SHARE: the coefficients of -log2(e) p(t), from t^0 on. GROWTH: those of p(t) + 2 t p'(t), with which
// f'(x) = s + x s (1 - s) GROWTH(x^2), s = sigma(x p(x^2)).
constexpr float GELU_SHARE[] = {-GELU_SCALE * LOG2_E, -GELU_SCALE * GELU_CUBE * LOG2_E};
constexpr float GELU_GROWTH[] = {GELU_SCALE, 3.0f * GELU_SCALE * GELU_CUBE};
// p fits ln(Phi(x) / Phi(-x)) / x so that the error of Phi(x) is below 3e-8 for all x, and that of the derivative below 5e-7, both
// before float32 rounds them.
// Beyond |x| = 6, where Phi is 0 or 1 to that precision, x p(x^2) goes on growing.
constexpr float EXACT_SHARE[] = {-2.30220938f,     -0.104835123f,   9.40492173e-05f, 0.00015957994f,
                                 -1.14398345e-05f, 3.81631338e-07f, -5.06723774e-09f};
constexpr float EXACT_GROWTH[] = {1.59576988f,      0.217998505f,    -0.000325949746f,
                                  -0.000774286687f, 7.13654008e-05f, -2.90979347e-06f,
                                  4.5660439e-08f};

// p t^(k + 1) + c[k] t^k + ... + c[0] in p.
template <int k, int N, int K>
FM_INLINE void horner_each(const float (&c)[K], const vf (&t)[N], vf (&p)[N]) {
  if constexpr (k >= 0) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) p[i] = p[i] * t[i] + c[k];
    horner_each<k - 1>(c, t, p);
  }
}

// c[0] + c[1] t + c[2] t^2 + ...
template <int N, int K>
FM_INLINE void polynomial_each(const float (&c)[K], const vf (&t)[N], vf (&p)[N]) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) p[i] = t[i] * c[K - 1] + c[K - 2];
  horner_each<K - 3>(c, t, p);
}

template <const auto& SHARE, const auto& GROWTH>
struct ShareOf {
  // sigma(x p(x^2)).
  template <int N>
  FM_INLINE void share_each(const vf (&x)[N], vf (&s)[N]) {
    vf square[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) square[i] = x[i] * x[i];
    polynomial_each(SHARE, square, s);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) s[i] = s[i] * x[i];
    sigmoid_each(s);
  }

  // f(x) in place.
  template <int N>
  FM_INLINE void value_each(vf (&x)[N]) {
    vf s[N];
    share_each(x, s);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = x[i] * s[i];
  }

  // f'(x) in place. Where sigma is 0 or 1 the second term is 0, also when x GROWTH overflows.
  template <int N>
  FM_INLINE void slope_each(vf (&x)[N]) {
    vf s[N], square[N], slope[N];
    share_each(x, s);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) square[i] = x[i] * x[i];
    polynomial_each(GROWTH, square, slope);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) slope[i] = slope[i] * x[i];
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = s[i] * (1.0f - s[i]);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) slope[i] = x[i] == 0.0f ? x[i] : slope[i] * x[i];
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = slope[i] + s[i];
  }

  // x GROWTH(x^2) in place, of an x so near to 0 that it stays finite: beyond, sigma is 0 or 1.
  template <int N>
  FM_INLINE void growth_each(vf (&x)[N]) {
    vf square[N], growth[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i)
      x[i] = fast_max(broadcast(-16.0f), fast_min(broadcast(16.0f), x[i]));
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) square[i] = x[i] * x[i];
    polynomial_each(GROWTH, square, growth);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = x[i] * growth[i];
  }
};

using Gelu = ShareOf<GELU_SHARE, GELU_GROWTH>;
using ExactGelu = ShareOf<EXACT_SHARE, EXACT_GROWTH>;

struct SquaredRelu {
  template <int N>
  FM_INLINE void value_each(vf (&x)[N]) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = fast_max(vf{}, x[i]);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = x[i] * x[i];
  }

  template <int N>
  FM_INLINE void slope_each(vf (&x)[N]) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = fast_max(vf{}, x[i]);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = x[i] + x[i];
  }
};

FM_INLINE vf sigmoid(vf x) { return reciprocal(exp(-x) + 1.0f); }

struct Silu {
  template <int N>
  FM_INLINE void share_each(const vf (&x)[N], vf (&s)[N]) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) s[n] = sigmoid(x[n]);
  }
  template <int N>
  FM_INLINE void growth_each(vf (&)[N]) {}

  // x sigma(x) in place.
  template <int N>
  FM_INLINE void value_each(vf (&x)[N]) {
    vf s[N];
    sigma_each(x, s);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) x[n] = x[n] * s[n];
  }

  // sigma (1 + x (1 - sigma)) in place. The second term is 0 where sigma is 0 or 1, also of an infinite x.
  template <int N>
  FM_INLINE void slope_each(vf (&x)[N]) {
    vf s[N], t[N];
    sigma_each(x, s);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) t[n] = s[n] * (1.0f - s[n]);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) x[n] = s[n] + (t[n] == 0.0f ? t[n] : x[n] * t[n]);
  }

 private:
  // share_each in stages that the vectors pass side by side; the gate keeps its bits.
  template <int N>
  FM_INLINE void sigma_each(const vf (&x)[N], vf (&s)[N]) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) s[n] = x[n] * -LOG2_E;
    sigmoid_each(s);
  }
};

// Calls f with an activation that has value_each and slope_each; the binding has checked that it is one of these.
template <class F>
FM_INLINE void with_activation(Activation activation, const F& f) {
  if (activation == Activation::gelu) return f(Gelu());
  if (activation == Activation::gelu_exact) return f(ExactGelu());
  f(SquaredRelu());
}

// A value of the activation, or x where there is none.
FM_INLINE vf activated(Activation activation, vf x) {
  vf one[1] = {x};
  if (activation != Activation::none)
    with_activation(activation, [&](auto f) { f.value_each(one); });
  return one[0];
}

template <class T>
FM_INLINE vf load_or_zero(const T* p, int64_t i, int lanes) {
  return p ? load_lanes(p + i, lanes) : vf{};
}

template <int R, class F, class T>
FM_INLINE void activation_rows(const F& activation, const T* x, int64_t x_row, const T* bias, T* y,
                               int64_t cols) {
  for_vector_groups<CHAINS / R>(0, cols, [&](auto count, int64_t i, int lanes) FM_INLINE_LAMBDA {
    constexpr int K = decltype(count)::value;  // vectors of a row
    vf v[R * K];
#pragma GCC unroll 16
    for (int n = 0; n < R * K; ++n) {
      const int64_t at = i + n % K * VL;
      v[n] = load_lanes(x + n / K * x_row + at, lanes) + load_or_zero(bias, at, lanes);
    }
    activation.value_each(v);
#pragma GCC unroll 16
    for (int n = 0; n < R * K; ++n) store_lanes(y + n / K * cols + i + n % K * VL, v[n], lanes);
  });
}

// dx = dy f'(x).
template <int R, class F, class T>
FM_INLINE void activation_backward_rows(const F& activation, const T* dy, const T* x, int64_t x_row,
                                        T* dx, int64_t cols) {
  for_vector_groups<CHAINS / R>(0, cols, [&](auto count, int64_t i, int lanes) FM_INLINE_LAMBDA {
    constexpr int K = decltype(count)::value;  // vectors of a row
    vf v[R * K];
#pragma GCC unroll 16
    for (int n = 0; n < R * K; ++n) v[n] = load_lanes(x + n / K * x_row + i + n % K * VL, lanes);
    activation.slope_each(v);
#pragma GCC unroll 16
    for (int n = 0; n < R * K; ++n) {
      const int64_t at = n / K * cols + i + n % K * VL;
      store_lanes(dx + at, v[n] * load_lanes(dy + at, lanes), lanes);
    }
  });
}

// body(an activation, an element, rows of a block, first row) of all rows.
template <class F>
FM_INLINE void for_activation_blocks(const ActivationArgs& a, const F& body) {
  const auto blocks = [&](auto element, auto activation) {
    parallel_for(a.rows, row_grain(a.cols), [&](int64_t begin, int64_t end) {
      for_row_blocks(begin, end,
                     [&](auto block, int64_t row) { body(activation, element, block, row); });
    });
  };
  with_dtype(a.dtype, [&](auto element) {
    if (a.activation == Activation::silu) return blocks(element, Silu());
    with_activation(a.activation, [&](auto activation) { blocks(element, activation); });
  });
}

static void activate(const ActivationArgs& a) {
  for_activation_blocks(a, [&](auto activation, auto element, auto block, int64_t row) {
    using T = decltype(element);
    activation_rows<decltype(block)::value>(activation, static_cast<const T*>(a.x) + row * a.x_row,
                                            a.x_row, static_cast<const T*>(a.bias),
                                            static_cast<T*>(a.y) + row * a.cols, a.cols);
  });
}

// y is dx.
static void activate_backward(const ActivationArgs& a, const void* dy) {
  for_activation_blocks(a, [&](auto activation, auto element, auto block, int64_t row) {
    using T = decltype(element);
    activation_backward_rows<decltype(block)::value>(
        activation, static_cast<const T*>(dy) + row * a.cols,
        static_cast<const T*>(a.x) + row * a.x_row, a.x_row, static_cast<T*>(a.y) + row * a.cols,
        a.cols);
  });
}

}  // namespace fm::FM_TARGET
