// Word and position embedding: rows of a table by token, zeros for tokens of other ranks, and the gradients, which are
// added to float32 tables. Reference: embedding_reference.cc. Tested by tests/kernels/test_embedding.py.
#pragma once
#include "rowwise/rowwise_blocks.h"

namespace fm::FM_TARGET {

constexpr int64_t TOKENS_AHEAD = Tuning::TOKENS_AHEAD;

// Row of this table for token i, or -1 when it is another rank's.
FM_INLINE int64_t table_row(const EmbeddingArgs& a, int64_t i) {
  const int64_t row = a.tokens[i] - a.first_row;
  return row >= 0 && row < a.table_rows ? row : -1;
}

static void embedding(const EmbeddingArgs& a, const void* table, void* out, DType dtype) {
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(a.n, row_grain(a.cols), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = table_row(a, i);
        const T* from = static_cast<const T*>(table) + (row < 0 ? 0 : row) * a.cols;
        T* to = static_cast<T*>(out) + i * a.cols;
        for_vectors(0, a.cols, [&](int64_t c, int lanes) {
          store_lanes(to + c, row < 0 ? vf{} : load_lanes(from + c, lanes), lanes);
        });
      }
    });
  });
}

// dtable[row of token i] += dout[i]. A thread owns columns and takes the tokens in order.
static void embedding_backward(const EmbeddingArgs& a, const void* dout, DType dtype,
                               float* dtable) {
  with_dtype(dtype, [&](auto element) {
    const auto* from = static_cast<const decltype(element)*>(dout);
    parallel_for(a.cols, COLUMN_BLOCK, [&](int64_t begin, int64_t end) {
      for (int64_t i = 0; i < a.n; ++i) {
        const int64_t row = table_row(a, i),
                      ahead = i + TOKENS_AHEAD < a.n ? table_row(a, i + TOKENS_AHEAD) : -1;
        if (ahead >= 0) {
          for (int64_t c = begin; c < end; c += COLUMN_BLOCK / 4)
            prefetch_write(dtable + ahead * a.cols + c);
        }
        if (row < 0) continue;
        for_vectors(begin, end, [&](int64_t c, int lanes) {
          add_to(dtable + row * a.cols + c, load_lanes(from + i * a.cols + c, lanes), lanes);
        });
      }
    });
  });
}

// out (s, b, cols) = x + table[position]
static void add_position(const void* x, const void* table, void* out, DType dtype, int64_t s,
                         int64_t b, int64_t cols) {
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    parallel_for(s * b, row_grain(cols), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T *from = static_cast<const T*>(x) + row * cols,
                *add = static_cast<const T*>(table) + row / b * cols;
        T* to = static_cast<T*>(out) + row * cols;
        for_vectors(0, cols, [&](int64_t c, int lanes) {
          store_lanes(to + c, load_lanes(from + c, lanes) + load_lanes(add + c, lanes), lanes);
        });
      }
    });
  });
}

// dtable[position] += dout[position][0] + dout[position][1] + ...
static void add_position_backward(const void* dout, DType dtype, float* dtable, int64_t s,
                                  int64_t b, int64_t cols) {
  with_dtype(dtype, [&](auto element) {
    const auto* from = static_cast<const decltype(element)*>(dout);
    parallel_for(s, row_grain(cols), [&](int64_t begin, int64_t end) {
      for (int64_t position = begin; position < end; ++position) {
        for_vectors(0, cols, [&](int64_t c, int lanes) {
          vf sum = {};
          for (int64_t k = 0; k < b; ++k)
            sum += load_lanes(from + (position * b + k) * cols + c, lanes);
          add_to(dtable + position * cols + c, sum, lanes);
        });
      }
    });
  });
}

}  // namespace fm::FM_TARGET
