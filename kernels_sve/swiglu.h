// SwiGLU: silu(gate) up, and its backward, which computes silu again. Storage float32, bfloat16 or float16, arithmetic float32.
//   silu(g) = g sigma(g),   sigma(g) = 1 / (1 + exp(-g))                                        (Shazeer, 2020)
//   dgate = dy up sigma(g) (1 + g (1 - sigma(g))),   dup = dy silu(g)
// Reference: reference_swiglu.cc. Tested by tests/kernels/test_swiglu.py.
#pragma once
#include "rowwise_blocks.h"

namespace fm::FM_TARGET {

constexpr int64_t AHEAD = Tuning::GATE_AHEAD;

FM_INLINE vf sigmoid(vf x) { return reciprocal(exp(-x) + 1.0f); }

// A row at a time, so that memory is read in few streams; CHAINS of its vectors side by side, each stage for all of them, because
// sigma is a chain of some twenty dependent instructions.
template <class T>
FM_INLINE void swiglu_row(const SwiGLUArgs& a, int64_t row, T* y) {
  const T *gate = static_cast<const T*>(a.x) + row * a.x_row, *up = gate + a.x_part;
  for_vector_groups<CHAINS>(0, a.cols, [&](auto count, int64_t i, int lanes) FM_INLINE_LAMBDA {
    constexpr int N = decltype(count)::value;
    vf v[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const int64_t at = i + n * VL;
      prefetch_ahead<AHEAD>(gate + at), prefetch_ahead<AHEAD>(up + at);
      v[n] = sigmoid(load_lanes(gate + at, lanes));
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) v[n] = load_lanes(gate + i + n * VL, lanes) * v[n] * load_lanes(up + i + n * VL, lanes);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store_lanes(y + row * a.cols + i + n * VL, v[n], lanes);
  });
}

// dx may be x: both parts are read before either is written.
template <class T>
FM_INLINE void swiglu_backward_row(const SwiGLUArgs& a, const SwiGLUGradArgs& grad, int64_t row) {
  const T *gate = static_cast<const T*>(a.x) + row * a.x_row, *up = gate + a.x_part;
  const T* dy = static_cast<const T*>(grad.dy) + row * a.cols;
  T *dgate = static_cast<T*>(grad.dx) + row * grad.dx_row, *dup = dgate + grad.dx_part;
  for_vector_groups<CHAINS>(0, a.cols, [&](auto count, int64_t i, int lanes) FM_INLINE_LAMBDA {
    constexpr int N = decltype(count)::value;
    vf to_gate[N], to_up[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const int64_t at = i + n * VL;
      prefetch_ahead<AHEAD>(gate + at), prefetch_ahead<AHEAD>(up + at), prefetch_ahead<AHEAD>(dy + at);
      to_up[n] = sigmoid(load_lanes(gate + at, lanes));
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const int64_t at = i + n * VL;
      const vf g = load_lanes(gate + at, lanes), share = to_up[n], scaled = load_lanes(dy + at, lanes) * share;
      to_gate[n] = scaled * load_lanes(up + at, lanes) * (g * (1.0f - share) + 1.0f);
      to_up[n] = scaled * g;
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      store_lanes(dgate + i + n * VL, to_gate[n], lanes);
      store_lanes(dup + i + n * VL, to_up[n], lanes);
    }
  });
}

static void swiglu(const SwiGLUArgs& a, void* y) {
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(a.rows, row_grain(a.cols), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) swiglu_row(a, row, static_cast<T*>(y));
    });
  });
}

static void swiglu_backward(const SwiGLUArgs& a, const SwiGLUGradArgs& grad) {
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(a.rows, row_grain(a.cols), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) swiglu_backward_row<T>(a, grad, row);
    });
  });
}

}  // namespace fm::FM_TARGET
