// Ops of the families rowwise.h, rowwise_cross_entropy.h, pointwise.h and pointwise_embedding.h.
#include "driver.h"

namespace fm::driver {
namespace {

constexpr float EPSILON = 1e-5f;

LayerNormArgs norm_of(Work& w, const void* x, int64_t rows, int64_t cols) {
  return {x,    w.input(cols), w.input(cols), w.output(rows * cols), w.output_f32(rows), w.output_f32(rows), rows,
          cols, EPSILON,       w.dtype};
}

void layer_norm(Work& w, const Shape& n) {
  const LayerNormArgs args = norm_of(w, w.input(n[0] * n[1]), n[0], n[1]);
  w.run = [=] { kernels().layer_norm(args); };
}

LayerNormGradArgs norm_gradient(Work& w, const LayerNormArgs& norm) {
  const int64_t n = norm.rows * norm.cols;
  return {w.input(n),
          w.input(n),
          norm.x,
          norm.weight,
          norm.mean,
          norm.rstd,
          w.output(n),
          w.updated_f32(norm.cols),
          w.updated_f32(norm.cols),
          norm.rows,
          norm.cols,
          w.dtype};
}

void layer_norm_backward(Work& w, const Shape& n) {
  const LayerNormArgs norm = norm_of(w, w.input(n[0] * n[1]), n[0], n[1]);
  kernels().layer_norm(norm);
  const LayerNormGradArgs args = norm_gradient(w, norm);
  w.run = [=] { kernels().layer_norm_backward(args); };
}

DropoutArgs dropout_of(const Shape& n) { return {n[0], n[1], 1, n[2], 0.1f, 1234, 5, 0, 0, 0}; }

ResidualArgs residual_of(Work& w, const Shape& n) {
  const int64_t count = n[0] * n[1] * n[2];
  return {w.input(count), w.input(n[2]), w.input(count), w.output(count), w.dtype, dropout_of(n)};
}

void bias_dropout_add(Work& w, const Shape& n) {
  const ResidualArgs args = residual_of(w, n);
  w.run = [=] { kernels().bias_dropout_add(args); };
}

void bias_dropout_add_layer_norm(Work& w, const Shape& n) {
  const ResidualArgs sum = residual_of(w, n);
  const LayerNormArgs norm = norm_of(w, sum.out, n[0] * n[1], n[2]);
  w.run = [=] { kernels().bias_dropout_add_layer_norm(sum, norm); };
}

void bias_dropout_add_layer_norm_backward(Work& w, const Shape& n) {
  const ResidualArgs sum = residual_of(w, n);
  const LayerNormArgs norm = norm_of(w, sum.out, n[0] * n[1], n[2]);
  kernels().bias_dropout_add_layer_norm(sum, norm);
  const LayerNormGradArgs grad = norm_gradient(w, norm);
  const ResidualGradArgs residual{grad.dx, w.output(n[0] * n[1] * n[2]), w.updated_f32(n[2]), w.dtype, dropout_of(n)};
  w.run = [=] { kernels().bias_dropout_add_layer_norm_backward(grad, residual); };
}

CrossEntropyArgs entropy_of(Work& w, const Shape& n) {
  return {w.input(n[0] * n[1], 4), w.dtype,           n[0], n[1], w.indices(n[0], n[1]), 0, w.output_f32(n[0]),
          w.output_f32(n[0]),      w.output_f32(n[0])};
}

void cross_entropy_forward(Work& w, const Shape& n) {
  const CrossEntropyArgs args = entropy_of(w, n);
  w.run = [=] { kernels().cross_entropy_forward(args); };
}

void cross_entropy_backward(Work& w, const Shape& n) {
  const CrossEntropyArgs args = entropy_of(w, n);
  kernels().cross_entropy_forward(args);
  const float* dloss = w.input_f32(n[0]);
  void* out = w.output(n[0] * n[1]);
  w.run = [=, &w] { kernels().cross_entropy_backward(args, dloss, out, w.dtype); };
}

void gelu(Work& w, const Shape& n) {
  const void *x = w.input(n[0] * n[1], 3), *bias = w.input(n[1]);
  void* y = w.output(n[0] * n[1]);
  w.run = [=, &w] { kernels().gelu(x, bias, y, w.dtype, n[0], n[1]); };
}

void gelu_backward(Work& w, const Shape& n) {
  const void *x = w.input(n[0] * n[1], 3), *bias = w.input(n[1]), *dy = w.input(n[0] * n[1]);
  void* dx = w.output(n[0] * n[1]);
  float* dbias = w.updated_f32(n[1]);
  w.run = [=, &w] { kernels().gelu_backward(dy, x, bias, dx, dbias, w.dtype, n[0], n[1]); };
}

void column_sum(Work& w, const Shape& n) {
  const void* x = w.input(n[0] * n[1]);
  float* sum = w.updated_f32(n[1]);
  w.run = [=, &w] { kernels().column_sum(x, w.dtype, sum, n[0], n[1]); };
}

void embedding(Work& w, const Shape& n) {
  const EmbeddingArgs args{w.indices(n[0], n[1]), n[0], 0, n[1], n[2]};
  const void* table = w.input(n[1] * n[2]);
  void* out = w.output(n[0] * n[2]);
  w.run = [=, &w] { kernels().embedding(args, table, out, w.dtype); };
}

const Register all[] = {
    {{"layer_norm", "ROWS COLS", {256, 768}, layer_norm}},
    {{"layer_norm_backward", "ROWS COLS", {256, 768}, layer_norm_backward}},
    {{"bias_dropout_add", "S B COLS", {64, 4, 768}, bias_dropout_add}},
    {{"bias_dropout_add_layer_norm", "S B COLS", {64, 4, 768}, bias_dropout_add_layer_norm}},
    {{"bias_dropout_add_layer_norm_backward", "S B COLS", {64, 4, 768}, bias_dropout_add_layer_norm_backward}},
    {{"cross_entropy_forward", "ROWS COLS", {16, 8192}, cross_entropy_forward}},
    {{"cross_entropy_backward", "ROWS COLS", {16, 8192}, cross_entropy_backward}},
    {{"gelu", "ROWS COLS", {64, 3072}, gelu}},
    {{"gelu_backward", "ROWS COLS", {64, 3072}, gelu_backward}},
    {{"column_sum", "ROWS COLS", {256, 768}, column_sum}},
    {{"embedding", "TOKENS ROWS COLS", {256, 1024, 768}, embedding}},
};

}  // namespace
}  // namespace fm::driver
