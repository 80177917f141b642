// The causal depthwise convolution before the delta rule, with SiLU, its backward, and one token of generation:
//   c_t = sum over taps of weight[tap] x_(t - w + 1 + tap),   y = c sigma(c)
// Inputs of another document, and those before the first token that no caller gave, are zeros. Backward computes c again; a thread has
// all tokens of its columns, so that the weight's gradient is summed in one order. Storage float32, bfloat16 or float16, arithmetic
// float32. Reference: delta_net_reference.cc. Tested by tests/kernels/test_delta_net.py. Included by delta_net.h.
#pragma once
#include "rowwise/rowwise_blocks.h"

namespace fm::FM_TARGET {

constexpr int64_t MOST_TAPS = 8, CONVOLUTION_COLUMNS = 128;

// The inputs of a call. Token t of a sequence, from -(taps - 1) on; null: zeros.
template <class T>
struct ConvolutionInputs {
  const ConvolutionArgs& a;
  const T* row(int64_t t, int64_t sample) const {
    if (t >= 0) return static_cast<const T*>(a.x) + (t * a.b + sample) * a.x_row;
    if (!a.earlier) return nullptr;
    return static_cast<const T*>(a.earlier) + ((t + a.taps - 1) * a.b + sample) * a.cols;
  }
  // Whether token t belongs to the document of the later token.
  bool shared(int64_t t, int64_t later, int64_t sample) const {
    const int64_t start = a.starts ? a.starts[sample * a.s + later] : 0;
    return start == 0 || t >= start;
  }
  // The inputs of token t's taps.
  void window(int64_t t, int64_t sample, const T* (&rows)[MOST_TAPS]) const {
    for (int64_t tap = 0; tap < a.taps; ++tap) {
      const int64_t from = t - a.taps + 1 + tap;
      rows[tap] = shared(from, t, sample) ? row(from, sample) : nullptr;
    }
  }
};

// weight (cols, taps) as (taps, columns) floats.
template <class T>
FM_INLINE void load_taps(const ConvolutionArgs& a, int64_t first, int64_t columns, float* to) {
  const T* weight = static_cast<const T*>(a.weight) + first * a.taps;
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t tap = 0; tap < a.taps; ++tap)
      to[tap * columns + c] = load_scalar(weight + c * a.taps + tap);
  }
}

template <class T>
FM_INLINE vf convolve(const T* const (&rows)[MOST_TAPS], const float* taps, int64_t stride,
                      int64_t count, int64_t i, int64_t from, int lanes) {
  vf sum = {};
  for (int64_t tap = 0; tap < count; ++tap) {
    if (rows[tap])
      sum = load_lanes(rows[tap] + from + i, lanes) * load_lanes(taps + tap * stride + i, lanes) +
            sum;
  }
  return sum;
}

template <class T>
FM_INLINE void convolution_row(const ConvolutionArgs& a, const T* const (&rows)[MOST_TAPS],
                               const float* taps, T* y) {
  for_vector_groups<CHAINS>(0, a.cols, [&](auto count, int64_t i, int lanes) FM_INLINE_LAMBDA {
    constexpr int N = decltype(count)::value;
    vf sum[N], sigma[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      sum[n] = convolve(rows, taps, a.cols, a.taps, i + n * VL, 0, lanes);
      sigma[n] = sum[n] * -LOG2_E;
    }
    sigmoid_each(sigma);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store_lanes(y + i + n * VL, sum[n] * sigma[n], lanes);
  });
}

static void convolution_forward(const ConvolutionArgs& a, void* y) {
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    const ConvolutionInputs<T> inputs{a};
    parallel_for(a.s * a.b, row_grain(a.cols), [&](int64_t begin, int64_t end) {
      float* taps = static_cast<float*>(scratch(0, a.taps * a.cols * sizeof(float)));
      load_taps<T>(a, 0, a.cols, taps);
      for (int64_t row = begin; row < end; ++row) {
        const T* rows[MOST_TAPS];
        inputs.window(row / a.b, row % a.b, rows);
        convolution_row(a, rows, taps, static_cast<T*>(y) + row * a.cols);
      }
    });
  });
}

// A block of columns of all tokens: the gradients of the inputs, and those of the weight, which are added to dtaps (taps, columns).
template <class T>
static void convolution_backward_columns(const ConvolutionArgs& a, const ConvolutionGradArgs& grad,
                                         int64_t from, int64_t columns, const float* taps,
                                         float* sums, float* dtaps) {
  const ConvolutionInputs<T> inputs{a};
  for (int64_t sample = 0; sample < a.b; ++sample) {
    const int64_t first = grad.dearlier ? 1 - a.taps : 0;
    for (int64_t t = a.s - 1; t >= first; --t) {
      // sums: the gradients of c of the last tokens, in turn.
      if (t >= 0) {
        const T* rows[MOST_TAPS];
        inputs.window(t, sample, rows);
        const T* dy = static_cast<const T*>(grad.dy) + (t * a.b + sample) * a.cols + from;
        float* sum = sums + t % a.taps * columns;
        for_vectors(0, columns, [&](int64_t i, int lanes) {
          const vf c = convolve(rows, taps, columns, a.taps, i, from, lanes);
          vf sigma[1] = {c * -LOG2_E};
          sigmoid_each(sigma);
          const vf gradient = load_lanes(dy + i, lanes) * sigma[0] * (c * (1.0f - sigma[0]) + 1.0f);
          store_lanes(sum + i, gradient, lanes);
          for (int64_t tap = 0; tap < a.taps; ++tap) {
            if (rows[tap])
              add_to(dtaps + tap * columns + i, gradient * load_lanes(rows[tap] + from + i, lanes),
                     lanes);
          }
        });
      }
      T* dx = t >= 0 ? static_cast<T*>(grad.dx) + (t * a.b + sample) * a.cols + from
                     : static_cast<T*>(grad.dearlier) + ((t + a.taps - 1) * a.b + sample) * a.cols +
                           from;
      for_vectors(0, columns, [&](int64_t i, int lanes) {
        vf total = {};
        for (int64_t tap = a.taps - 1; tap >= 0; --tap) {
          const int64_t later = t + a.taps - 1 - tap;
          if (later >= 0 && later < a.s && inputs.shared(t, later, sample))
            total = load_lanes(sums + later % a.taps * columns + i, lanes) *
                        load_lanes(taps + tap * columns + i, lanes) +
                    total;
        }
        store_lanes(dx + i, total, lanes);
      });
    }
  }
}

static void convolution_backward(const ConvolutionArgs& a, const ConvolutionGradArgs& grad) {
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t blocks = (a.cols + CONVOLUTION_COLUMNS - 1) / CONVOLUTION_COLUMNS;
    parallel_for(blocks, 1, [&](int64_t begin, int64_t end) {
      constexpr int64_t SIZE = MOST_TAPS * CONVOLUTION_COLUMNS;
      float* taps = static_cast<float*>(scratch(0, 3 * SIZE * sizeof(float)));
      float *sums = taps + SIZE, *dtaps = sums + SIZE;
      for (int64_t block = begin; block < end; ++block) {
        const int64_t from = block * CONVOLUTION_COLUMNS,
                      columns = min(CONVOLUTION_COLUMNS, a.cols - from);
        load_taps<T>(a, from, columns, taps);
        clear(dtaps, SIZE);
        convolution_backward_columns<T>(a, grad, from, columns, taps, sums, dtaps);
        for (int64_t c = 0; c < columns; ++c) {
          for (int64_t tap = 0; tap < a.taps; ++tap)
            add_to(grad.dweight + (from + c) * a.taps + tap, load_n(dtaps + tap * columns + c, 1),
                   1);
        }
      }
    });
  });
}

// One token of each of a.b samples; inputs (samples, taps - 1, cols) are the last of each sample, to which x is appended.
static void convolution_decode(const ConvolutionArgs& a, const int64_t* samples, void* inputs,
                               void* y) {
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(a.b, 1, [&](int64_t begin, int64_t end) {
      float* taps = static_cast<float*>(scratch(0, a.taps * a.cols * sizeof(float)));
      load_taps<T>(a, 0, a.cols, taps);
      for (int64_t row = begin; row < end; ++row) {
        T* last = static_cast<T*>(inputs) + samples[row] * (a.taps - 1) * a.cols;
        const T* rows[MOST_TAPS] = {};
        for (int64_t tap = 0; tap + 1 < a.taps; ++tap) rows[tap] = last + tap * a.cols;
        rows[a.taps - 1] = static_cast<const T*>(a.x) + row * a.x_row;
        convolution_row(a, rows, taps, static_cast<T*>(y) + row * a.cols);
        for (int64_t tap = 0; tap + 1 < a.taps; ++tap)
          __builtin_memcpy(last + tap * a.cols, rows[tap + 1], a.cols * sizeof(T));
      }
    });
  });
}

}  // namespace fm::FM_TARGET
