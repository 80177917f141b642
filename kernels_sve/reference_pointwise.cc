// Scalar references of pointwise.h and pointwise_embedding.h, in double where a formula is more than one addition.
#include <cmath>
#include <vector>

#include "reference.h"

namespace fm::reference {
namespace {

const double K = std::sqrt(2 / std::acos(-1.0)), CUBIC = 0.044715;

double gelu_of(double x) { return 0.5 * x * (1 + std::tanh(K * (x + CUBIC * x * x * x))); }

double gelu_slope(double x) {
  const double t = std::tanh(K * (x + CUBIC * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * K * (1 + 3 * CUBIC * x * x);
}

float with_bias(const void* x, const void* bias, DType dtype, int64_t i, int64_t cols) {
  return get(x, dtype, i) + (bias ? get(bias, dtype, i % cols) : 0);
}

// sum[i % cols] += values[i]
void add_columns(const std::vector<float>& values, float* sum, int64_t cols) {
  std::vector<double> total(cols);
  for (size_t i = 0; i < values.size(); ++i) total[i % cols] += values[i];
  for (int64_t c = 0; c < cols; ++c) sum[c] += static_cast<float>(total[c]);
}

}  // namespace

void gelu(const void* x, const void* bias, void* y, DType dtype, int64_t rows, int64_t cols) {
  for (int64_t i = 0; i < rows * cols; ++i)
    put(y, dtype, i, static_cast<float>(gelu_of(with_bias(x, bias, dtype, i, cols))));
}

void gelu_backward(const void* dy, const void* x, const void* bias, void* dx, float* dbias, DType dtype, int64_t rows,
                   int64_t cols) {
  std::vector<float> grad(rows * cols);
  for (int64_t i = 0; i < rows * cols; ++i) {
    grad[i] = static_cast<float>(get(dy, dtype, i) * gelu_slope(with_bias(x, bias, dtype, i, cols)));
    put(dx, dtype, i, grad[i]);
  }
  if (dbias) add_columns(grad, dbias, cols);
}

void column_sum(const void* x, DType dtype, float* sum, int64_t rows, int64_t cols) {
  std::vector<float> values(rows * cols);
  for (int64_t i = 0; i < rows * cols; ++i) values[i] = get(x, dtype, i);
  add_columns(values, sum, cols);
}

void add(const void* x, const void* y, void* out, DType dtype, int64_t n) {
  for (int64_t i = 0; i < n; ++i) put(out, dtype, i, get(x, dtype, i) + get(y, dtype, i));
}

void axpy(float alpha, const void* x, DType x_dtype, void* y, DType y_dtype, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    put(y, y_dtype, i, static_cast<float>(static_cast<double>(alpha) * get(x, x_dtype, i) + get(y, y_dtype, i)));
}

void sum_rows(const void* x, DType x_dtype, int64_t count, int64_t stride, void* out, DType out_dtype, int64_t n,
              float scale) {
  for (int64_t i = 0; i < n; ++i) {
    float sum = 0;  // float, in order: the sum of a reduction is defined by it
    for (int64_t k = 0; k < count; ++k) sum += get(x, x_dtype, k * stride + i);
    put(out, out_dtype, i, sum * scale);
  }
}

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

void add_position(const void* x, const void* table, void* out, DType dtype, int64_t s, int64_t b, int64_t cols) {
  for (int64_t i = 0; i < s * b * cols; ++i)
    put(out, dtype, i, get(x, dtype, i) + get(table, dtype, i / cols / b * cols + i % cols));
}

void add_position_backward(const void* dout, DType dtype, float* dtable, int64_t s, int64_t b, int64_t cols) {
  for (int64_t p = 0; p < s; ++p)
    for (int64_t c = 0; c < cols; ++c) {
      float sum = 0;
      for (int64_t k = 0; k < b; ++k) sum += get(dout, dtype, (p * b + k) * cols + c);
      dtable[p * cols + c] += sum;
    }
}

}  // namespace fm::reference
