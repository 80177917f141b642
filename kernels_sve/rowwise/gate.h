// The gate of an MLP, SwiGLU or GeGLU: f(gate) up, and its backward, which computes f again. Storage float32, bfloat16 or float16,
// arithmetic float32. f(g) = g share(g), with sigma(g) = 1 / (1 + exp(-g))                                       (Shazeer, 2020)
//   silu(g) = g sigma(g),   gelu(g) = g sigma(2 u(g)) as in activation.h
//   dgate = dy up share(g) (1 + growth(g) (1 - share(g))),   dup = dy f(g);   growth(g) is g for silu, 2 g u'(g) for gelu
// SCALED: with a factor of each row, whose gradient is the sum over the row of dy f(g) up, from the same pass.
// Reference: gate_reference.cc. Tested by tests/kernels/test_gate.py.
#pragma once
#include "rowwise/activation.h"

namespace fm::FM_TARGET {

constexpr int64_t AHEAD = Tuning::GATE_AHEAD;

template <class F>
FM_INLINE void with_gate(Activation activation, const F& f) {
  if (activation == Activation::silu) return f(Silu());
  f(Gelu());
}

// A row at a time, so that memory is read in few streams; CHAINS of its vectors side by side, each stage for all of them, because
// a share is a chain of some twenty dependent instructions.
template <class Gate, bool SCALED = false, class T>
FM_INLINE void gate_row(const GateArgs& a, int64_t row, T* y) {
  const T *gate = static_cast<const T*>(a.x) + row * a.x_row, *up = gate + a.x_part;
  const float factor = SCALED ? a.factors[row] : 1.0f;
  for_vector_groups<CHAINS>(0, a.cols, [&](auto count, int64_t i, int lanes) FM_INLINE_LAMBDA {
    constexpr int N = decltype(count)::value;
    vf v[N], share[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const int64_t at = i + n * VL;
      prefetch_ahead<AHEAD>(gate + at), prefetch_ahead<AHEAD>(up + at);
      v[n] = load_lanes(gate + at, lanes);
    }
    Gate::share_each(v, share);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      v[n] = load_lanes(gate + i + n * VL, lanes) * share[n] * load_lanes(up + i + n * VL, lanes);
      if constexpr (SCALED) v[n] *= factor;
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store_lanes(y + row * a.cols + i + n * VL, v[n], lanes);
  });
}

// dx may be x, and y may be dy: all of a group of vectors is read before any of it is written.
template <class Gate, class T, bool SCALED = false>
FM_INLINE void gate_backward_row(const GateArgs& a, const GateGradArgs& grad, int64_t row) {
  const T *gate = static_cast<const T*>(a.x) + row * a.x_row, *up = gate + a.x_part;
  const T* dy = static_cast<const T*>(grad.dy) + row * a.cols;
  T *dgate = static_cast<T*>(grad.dx) + row * grad.dx_row, *dup = dgate + grad.dx_part;
  const float factor = SCALED ? a.factors[row] : 1.0f;
  vf dfactor = {};
  for_vector_groups<CHAINS>(0, a.cols, [&](auto count, int64_t i, int lanes) FM_INLINE_LAMBDA {
    constexpr int N = decltype(count)::value;
    vf to_gate[N], to_up[N], y[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const int64_t at = i + n * VL;
      prefetch_ahead<AHEAD>(gate + at), prefetch_ahead<AHEAD>(up + at),
          prefetch_ahead<AHEAD>(dy + at);
      to_gate[n] = load_lanes(gate + at, lanes);
    }
    Gate::share_each(to_gate, to_up);
    Gate::growth_each(to_gate);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const int64_t at = i + n * VL;
      const vf share = to_up[n];
      vf scaled = load_lanes(dy + at, lanes) * share;
      if constexpr (SCALED) {
        y[n] = load_lanes(gate + at, lanes) * share * load_lanes(up + at, lanes);
        dfactor += load_lanes(dy + at, lanes) * y[n];
        y[n] *= factor, scaled *= factor;
      }
      to_gate[n] = scaled * load_lanes(up + at, lanes) * (to_gate[n] * (1.0f - share) + 1.0f);
      to_up[n] = scaled * load_lanes(gate + at, lanes);
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      if constexpr (SCALED)
        store_lanes(static_cast<T*>(grad.y) + row * a.cols + i + n * VL, y[n], lanes);
      store_lanes(dgate + i + n * VL, to_gate[n], lanes);
      store_lanes(dup + i + n * VL, to_up[n], lanes);
    }
  });
  if constexpr (SCALED) grad.dfactors[row] = hsum(dfactor);
}

// body(a gate's class, an element, row) of all rows.
template <class F>
FM_INLINE void for_gate_rows(const GateArgs& a, const F& body) {
  with_dtype(a.dtype, [&](auto element) {
    with_gate(a.activation, [&](auto gate) {
      parallel_for(a.rows, row_grain(a.cols), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) body(gate, element, row);
      });
    });
  });
}

static void gate(const GateArgs& a, void* y) {
  for_gate_rows(a, [&](auto gate, auto element, int64_t row) {
    auto* out = static_cast<decltype(element)*>(y);
    a.factors ? gate_row<decltype(gate), true>(a, row, out) : gate_row<decltype(gate)>(a, row, out);
  });
}

static void gate_backward(const GateArgs& a, const GateGradArgs& grad) {
  for_gate_rows(a, [&](auto gate, auto element, int64_t row) {
    a.factors ? gate_backward_row<decltype(gate), decltype(element), true>(a, grad, row)
              : gate_backward_row<decltype(gate), decltype(element)>(a, grad, row);
  });
}

}  // namespace fm::FM_TARGET
