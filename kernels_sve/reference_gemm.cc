// Scalar references of gemm.h: sums in double, in order of k. The packed form is B as [k][n] in its own type.
#include <cmath>

#include "reference.h"

namespace fm::reference {
namespace {

int64_t element_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

double gelu_sigmoid(double x) { return 1 / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }

double gelu_derivative(double x) {
  const double s = gelu_sigmoid(x), t = s * (1 - s);
  return s + (t == 0 ? t : x * 2 * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x) * t);
}

double b_element(const GemmArgs& g, int64_t p, int64_t j) {
  if (g.packed) return get(g.packed, g.in_dtype, p * g.n + j);
  return get(g.b, g.in_dtype, p * g.b_row + j * g.b_col);
}

void element(const GemmArgs& g, int64_t i, int64_t j) {
  double v = g.accumulate ? get(g.c, g.out_dtype, i * g.c_row + j) : 0;
  for (int64_t p = 0; p < g.k; ++p) v += double(get(g.a, g.in_dtype, i * g.a_row + p * g.a_col)) * b_element(g, p, j);
  if (g.bias) v += get(g.bias, g.out_dtype, j);
  if (g.pre) put(g.pre, g.out_dtype, i * g.pre_row + j, float(v));
  if (g.gelu) v *= gelu_sigmoid(v);
  if (g.gelu_input) v *= gelu_derivative(get(g.gelu_input, g.out_dtype, i * g.gelu_input_row + j));
  if (g.residual) v += get(g.residual, g.out_dtype, i * g.residual_row + j);
  put(g.c, g.out_dtype, i * g.c_row + j, float(v));
}

}  // namespace

void gemm(const GemmArgs& g) {
  for (int64_t i = 0; i < g.m; ++i) {
    for (int64_t j = 0; j < g.n; ++j) element(g, i, j);
    if (!g.a_sums) continue;
    double sum = g.a_sums[i];
    for (int64_t p = 0; p < g.k; ++p) sum += get(g.a, g.in_dtype, i * g.a_row + p * g.a_col);
    g.a_sums[i] = float(sum);
  }
}

int64_t packed_weight_size(int64_t n, int64_t k, DType dtype) { return n * k * element_bytes(dtype); }

void pack_weight(const GemmPackArgs& args) {
  for (int64_t p = 0; p < args.k; ++p) {
    for (int64_t j = 0; j < args.n; ++j) {
      put(args.packed, args.dtype, p * args.n + j, get(args.b, args.dtype, p * args.b_row + j * args.b_col));
    }
  }
}

}  // namespace fm::reference
