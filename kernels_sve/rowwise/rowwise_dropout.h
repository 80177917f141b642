// out = residual + dropout(x + bias) and its backward, by blocks of rows (Megatron's bias_dropout_add). The mask is
// that of the dropout kernel for (s, b, h) with sample_dim 1 (philox.h); the random words of a block of rows are made
// together. p = 0 makes none. Reference: rowwise_reference.cc. Tested by tests/kernels/test_rowwise.py.
#pragma once
#include "simd/philox.h"
#include "rowwise/rowwise_blocks.h"

namespace fm::FM_TARGET {

// c[r]: the random words of the calls from `call` on in R rows.
template <int R>
FM_ONCE void row_words(const DropoutArgs& a, PhiloxKey key, int64_t row, uint32_t call,
                       vu (&c)[R][4]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const uint64_t sample = a.key.first_sample + (row + r) % a.samples;
    c[r][0] = lane_index() + call;
    c[r][1] = broadcast(static_cast<uint32_t>(a.key.row0 + (row + r) / a.samples));
    c[r][2] = broadcast(static_cast<uint32_t>(sample));
    c[r][3] = broadcast(static_cast<uint32_t>(sample >> 32));
  }
  philox_sets<R>(c, key);
}

// Runs body(i, lanes, keep) for each vector of R rows of the (outer, samples, 1, cols) view; keep[r]: -1 in the lanes
// that stay. Columns begin at 0, so vectors and Philox blocks coincide.
template <int R, class F>
FM_INLINE void for_kept(const DropoutArgs& a, int64_t row, const F& body) {
  const PhiloxKey key = philox_key(a.key.seed, a.key.stream);
  const uint32_t threshold = dropout_threshold(a.p);
  for (int64_t first = 0; first < a.cols; first += PHILOX_BLOCK) {
#pragma GCC unroll 1
    for (int part = 0; part < PHILOX_CALLS; part += VL) {
      vu c[R][4];
      row_words<R>(a, key, row, static_cast<uint32_t>(first / 4 + part), c);
      // Not unrolled: body is long.
#pragma GCC unroll 1
      for (int word = 0; word < 4; ++word) {
        const int64_t i = first + word * PHILOX_CALLS + part;
        if (i >= a.cols) break;
        vi keep[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) keep[r] = c[r][word] >= threshold;
        if (i + VL <= a.cols) {
          body(i, VL, keep);
        } else {
          body(i, static_cast<int>(a.cols - i), keep);
        }
      }
    }
  }
}

template <int R, class T>
FM_ONCE void bias_dropout_add_rows(const ResidualArgs& a, int64_t row) {
  const int64_t cols = a.dropout.cols, first = row * cols;
  const T *x = static_cast<const T*>(a.x) + first,
          *residual = static_cast<const T*>(a.residual) + first;
  const T* bias = static_cast<const T*>(a.bias);
  T* out = static_cast<T*>(a.out) + first;
  auto value = [&](int r, int64_t i, int lanes, vf b) {
    return load_lanes(x + r * cols + i, lanes) + b;
  };
  auto bias_at = [&](int64_t i, int lanes) { return bias ? load_lanes(bias + i, lanes) : vf{}; };
  auto write = [&](int r, int64_t i, int lanes, vf v) {
    store_lanes(out + r * cols + i, load_lanes(residual + r * cols + i, lanes) + v, lanes);
  };
  if (a.dropout.p == 0) {
    return for_vectors(0, cols, [&](int64_t i, int lanes) {
      const vf b = bias_at(i, lanes);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) write(r, i, lanes, value(r, i, lanes, b));
    });
  }
  const float scale = 1.0f / (1.0f - a.dropout.p);
  for_kept<R>(a.dropout, row, [&](int64_t i, int lanes, const vi* keep) {
    const vf b = bias_at(i, lanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      write(r, i, lanes, select(keep[r], value(r, i, lanes, b) * scale, vf{}));
  });
}

// dbias: this chunk's column sums.
template <int R, class T>
FM_ONCE void bias_dropout_add_backward_rows(const ResidualGradArgs& a, int64_t row, float* dbias) {
  const int64_t cols = a.dropout.cols, first = row * cols;
  const T* dout = static_cast<const T*>(a.dout) + first;
  T* dx = a.dx ? static_cast<T*>(a.dx) + first : nullptr;
  if (a.dropout.p == 0 && !dx && !a.dbias) return;
  auto finish = [&](int64_t i, int lanes, const vf(&grad)[R]) {
    if (dx) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) store_lanes(dx + r * cols + i, grad[r], lanes);
    }
    if (a.dbias) add_to(dbias + i, sum_of(grad), lanes);
  };
  if (a.dropout.p == 0) {
    return for_vectors(0, cols, [&](int64_t i, int lanes) {
      vf grad[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) grad[r] = load_lanes(dout + r * cols + i, lanes);
      finish(i, lanes, grad);
    });
  }
  const float scale = 1.0f / (1.0f - a.dropout.p);
  for_kept<R>(a.dropout, row, [&](int64_t i, int lanes, const vi* keep) {
    vf grad[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
      grad[r] = select(keep[r], load_lanes(dout + r * cols + i, lanes) * scale, vf{});
    finish(i, lanes, grad);
  });
}

static void bias_dropout_add(const ResidualArgs& a) {
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(a.dropout.outer * a.dropout.samples, row_grain(a.dropout.cols),
                 [&](int64_t begin, int64_t end) {
                   for_row_blocks(begin, end, [&](auto block, int64_t row) {
                     bias_dropout_add_rows<decltype(block)::value, T>(a, row);
                   });
                 });
  });
}

static void bias_dropout_add_backward(const ResidualGradArgs& a) {
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    float* const sums[1] = {a.dbias};
    with_column_sums<1>(a.dropout.outer * a.dropout.samples, a.dropout.cols, sums,
                        [&](int64_t begin, int64_t end, float* partial, int64_t) {
                          for_row_blocks(begin, end, [&](auto block, int64_t row) {
                            bias_dropout_add_backward_rows<decltype(block)::value, T>(a, row,
                                                                                      partial);
                          });
                        });
  });
}

}  // namespace fm::FM_TARGET
