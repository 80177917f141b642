// Scalar references of embedding.h.
#include "reference.h"

namespace fm::reference {

void embedding(const EmbeddingArgs& a, const void* table, void* out, DType dtype) {
  for (int64_t i = 0; i < a.n * a.cols; ++i) {
    const int64_t row = a.tokens[i / a.cols] - a.first_row;
    const bool here = row >= 0 && row < a.table_rows;
    put(out, dtype, i, here ? get(table, dtype, row * a.cols + i % a.cols) : 0.0f);
  }
}

void embedding_backward(const EmbeddingArgs& a, const void* dout, DType dtype, float* dtable) {
  for (int64_t i = 0; i < a.n * a.cols; ++i) {
    const int64_t row = a.tokens[i / a.cols] - a.first_row;
    if (row >= 0 && row < a.table_rows) dtable[row * a.cols + i % a.cols] += get(dout, dtype, i);
  }
}

void add_position(const void* x, const void* table, void* out, DType dtype, int64_t s, int64_t b,
                  int64_t cols) {
  for (int64_t i = 0; i < s * b * cols; ++i)
    put(out, dtype, i, get(x, dtype, i) + get(table, dtype, i / cols / b * cols + i % cols));
}

void add_position_backward(const void* dout, DType dtype, float* dtable, int64_t s, int64_t b,
                           int64_t cols) {
  for (int64_t p = 0; p < s; ++p)
    for (int64_t c = 0; c < cols; ++c) {
      float sum = 0;
      for (int64_t k = 0; k < b; ++k) sum += get(dout, dtype, (p * b + k) * cols + c);
      dtable[p * cols + c] += sum;
    }
}

}  // namespace fm::reference
