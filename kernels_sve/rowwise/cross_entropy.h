// Cross-entropy of logits whose vocabulary may be split over tensor-parallel ranks, by rows:
//   sum_exp = sum over the vocabulary of exp(logit - row_max),  target_logit = logits[label] - row_max
//   loss = log(sum_exp) - target_logit,  dlogits = (factor exp(logit - row_max) / sum_exp - [column is the label]) dloss
// where factor = 1 + 2 z_loss z, z = log(sum_exp) + row_max, if the loss has z_loss z^2 added (Chowdhery et al., 2022, section 5).
// row_max, sum_exp and target_logit are reduced between the ranks by the caller (max, sum, sum); a label of another rank
// makes target_logit 0. cross_entropy_forward computes all three in one reading, for a vocabulary that is whole.
// A row with a label below 0 is not counted: its logits are not read, its sums are 0, and so is its gradient.
// Reference: cross_entropy_reference.cc. Tested by tests/kernels/test_cross_entropy.py.
#pragma once
#include "rowwise/rowwise_blocks.h"

namespace fm::FM_TARGET {

constexpr int64_t VOCABULARY_BLOCK = Tuning::VOCABULARY_BLOCK;
constexpr int EXP_WAYS = Tuning::EXP_WAYS;

FM_INLINE float minus_infinity() { return -__builtin_inff(); }
FM_INLINE float scalar_exp(float x) { return exp(broadcast(x))[0]; }

// A NaN is passed over: it shows in the sum.
template <class T>
FM_INLINE float max_of(const T* x, int64_t n) {
  vf top[EXP_WAYS];
  for (vf& t : top) t = broadcast(minus_infinity());
  int64_t i = 0;
  for (; i + EXP_WAYS * VL <= n; i += EXP_WAYS * VL) {
#pragma GCC unroll 4
    for (int k = 0; k < EXP_WAYS; ++k) top[k] = max(load(x + i + k * VL), top[k]);
  }
  for_vectors(i, n, [&](int64_t j, int lanes) {
    top[0] = max(first_of(load_lanes(x + j, lanes), lanes, top[0]), top[0]);
  });
  return hmax(max(max(top[0], top[1]), max(top[2], top[3])));
}

template <class T>
FM_INLINE float sum_exp_of(const T* x, int64_t n, float shift) {
  vf sum[EXP_WAYS] = {};
  int64_t i = 0;
  for (; i + EXP_WAYS * VL <= n; i += EXP_WAYS * VL) {
#pragma GCC unroll 4
    for (int k = 0; k < EXP_WAYS; ++k) sum[k] += exp(load(x + i + k * VL) - shift);
  }
  for_vectors(i, n, [&](int64_t j, int lanes) {
    sum[0] += first_of(exp(load_lanes(x + j, lanes) - shift), lanes);
  });
  return hsum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

template <class F>
FM_INLINE void for_vocabulary_blocks(int64_t cols, const F& body) {
  for (int64_t first = 0; first < cols; first += VOCABULARY_BLOCK)
    body(first, first + VOCABULARY_BLOCK < cols ? VOCABULARY_BLOCK : cols - first);
}

// body(row, logits of the row, column of its label or -1) of the rows that are counted, skip(row) of the others.
template <class T, class F, class G>
FM_INLINE void for_logit_rows(const CrossEntropyArgs& a, const F& body, const G& skip) {
  parallel_for(a.rows, 1 + Tuning::GRAIN / (a.cols + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (a.labels && a.labels[row] < 0) {
        skip(row);
        continue;
      }
      const int64_t label = a.labels ? a.labels[row] - a.first_row : -1;
      body(row, static_cast<const T*>(a.logits) + row * a.cols,
           label >= 0 && label < a.cols ? label : -1);
    }
  });
}

static void cross_entropy_max(const CrossEntropyArgs& a) {
  with_dtype(a.dtype, [&](auto element) {
    for_logit_rows<decltype(element)>(
        a, [&](int64_t row, auto* x, int64_t) { a.row_max[row] = max_of(x, a.cols); },
        [](int64_t) {});
  });
}

static void cross_entropy_sum(const CrossEntropyArgs& a) {
  with_dtype(a.dtype, [&](auto element) {
    const auto sum_row = [&](int64_t row, auto* x, int64_t label) {
      float sum = 0;
      for_vocabulary_blocks(a.cols, [&](int64_t first, int64_t n) {
        sum += sum_exp_of(x + first, n, a.row_max[row]);
      });
      a.sum_exp[row] = sum;
      a.target_logit[row] = label < 0 ? 0.0f : load_scalar(x + label) - a.row_max[row];
    };
    for_logit_rows<decltype(element)>(
        a, sum_row, [&](int64_t row) { a.sum_exp[row] = a.target_logit[row] = 0; });
  });
}

// Online softmax (Milakov and Gimelshein, 2018), by blocks of columns.
static void cross_entropy_forward(const CrossEntropyArgs& a) {
  with_dtype(a.dtype, [&](auto element) {
    const auto sum_row = [&](int64_t row, auto* x, int64_t label) {
      float top = minus_infinity(), sum = 0;
      for_vocabulary_blocks(a.cols, [&](int64_t first, int64_t n) {
        const float block_top = max_of(x + first, n);
        if (block_top > top) {
          sum *= scalar_exp(top - block_top);
          top = block_top;
        }
        sum += sum_exp_of(x + first, n,
                          top == minus_infinity() ? 0.0f : top);  // -inf less -inf would be NaN
      });
      a.row_max[row] = top;
      a.sum_exp[row] = sum;
      a.target_logit[row] = label < 0 ? 0.0f : load_scalar(x + label) - top;
    };
    for_logit_rows<decltype(element)>(a, sum_row, [&](int64_t row) {
      a.row_max[row] = a.sum_exp[row] = a.target_logit[row] = 0;
    });
  });
}

template <class T, class U>
FM_INLINE void cross_entropy_backward_of(const CrossEntropyArgs& a, const float* dloss, U* out) {
  const auto row_gradient = [&](int64_t row, const T* x, int64_t label) {
    U* to = out + row * a.cols;
    const vf sum = broadcast(a.sum_exp[row]);
    const float top = a.row_max[row],
                factor = a.z_loss ? 1.0f + 2.0f * a.z_loss * (log(sum)[0] + top) : 1.0f,
                probability = reciprocal(sum)[0] * factor, scale = probability * dloss[row];
    const float at_label =
        label < 0 ? 0.0f
                  : (scalar_exp(load_scalar(x + label) - top) * probability - 1.0f) * dloss[row];
    int64_t i = 0;
    for (; i + EXP_WAYS * VL <= a.cols; i += EXP_WAYS * VL) {
      vf e[EXP_WAYS];
#pragma GCC unroll 4
      for (int k = 0; k < EXP_WAYS; ++k) e[k] = exp(load(x + i + k * VL) - top);
#pragma GCC unroll 4
      for (int k = 0; k < EXP_WAYS; ++k) store_lanes(to + i + k * VL, e[k] * scale, VL);
    }
    for_vectors(i, a.cols, [&](int64_t j, int lanes) {
      store_lanes(to + j, exp(load_lanes(x + j, lanes) - top) * scale, lanes);
    });
    if (label >= 0) store_n(to + label, broadcast(at_label), 1);
  };
  for_logit_rows<T>(a, row_gradient, [&](int64_t row) {
    for_vectors(0, a.cols,
                [&](int64_t j, int lanes) { store_lanes(out + row * a.cols + j, vf{}, lanes); });
  });
}

static void cross_entropy_backward(const CrossEntropyArgs& a, const float* dloss, void* out,
                                   DType out_dtype) {
  with_dtype(a.dtype, [&](auto element) {
    with_dtype(out_dtype, [&](auto out_element) {
      cross_entropy_backward_of<decltype(element)>(a, dloss,
                                                   static_cast<decltype(out_element)*>(out));
    });
  });
}

}  // namespace fm::FM_TARGET
