// Scalar references of gemm.h: sums in double, in order of k; with fp16_chunk, of the chunks that were summed in FP16. The
// packed form is B as [k][n] in its own type. Of bf16x3 they are those of float32: the parts only add up to its numbers.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <vector>

#include "reference.h"
#include "simd/rounding_word.h"

namespace fm::reference {
namespace {

int64_t element_bytes(DType operands) { return stored_dtype(operands) == DType::f32 ? 4 : 2; }

float b_element(const GemmArgs& g, int64_t p, int64_t j) {
  if (g.packed) return get(g.packed, stored_dtype(g.in_dtype), p * g.n + j);
  if (!g.b_scales) return get(g.b, stored_dtype(g.in_dtype), p * g.b_row + j * g.b_col);
  const bool along_k = g.b_row == 1;
  return rounded(q8_element(static_cast<const int8_t*>(g.b) + p * g.b_row + j * g.b_col, g.b_scales,
                            along_k ? j : p, along_k ? p : j),
                 stored_dtype(g.in_dtype));
}

float a_element(const GemmArgs& g, int64_t i, int64_t p) {
  return get(g.a, stored_dtype(g.in_dtype), i * g.a_row + p * g.a_col);
}

double chunk_in_fp16(const GemmArgs& g, int64_t i, int64_t j, int64_t begin, int64_t end) {
  float sum = 0;
  for (int64_t p = begin; p < end; ++p) sum = fma_half(a_element(g, i, p), b_element(g, p, j), sum);
  return sum;
}

// A row of A or a column of B as int8, by the definition of gemm_int8.h.
struct Quantized {
  float scale;
  std::vector<int> q;
};

// number(p): element p's in A, for random rounding.
template <class F, class N>
Quantized quantize(int64_t k, const F& element, bool random, const N& number) {
  float most = 0;
  bool finite = true;
  for (int64_t p = 0; p < k; ++p) {
    const float x = std::fabs(element(p));
    finite = finite && x <= FLT_MAX;
    most = std::max(most, x);
  }
  Quantized row = {std::nanf(""), std::vector<int>(k)};
  if (!finite) return row;
  const bool zero = most < 0x1p-100f;
  row.scale = zero ? 0 : most / 127.0f;
  const float inverse = zero ? 0 : 127.0f / most;
  for (int64_t p = 0; p < k; ++p) {
    if (random) {
      const float units = element(p) * (inverse * INT8_UNITS);
      uint32_t bits;
      std::memcpy(&bits, &inverse, sizeof bits);
      row.q[p] = round_int8(static_cast<int32_t>(std::nearbyint(units)), number(p), bits);
    } else {
      const float scaled = element(p) * inverse;
      row.q[p] = static_cast<int>(std::nearbyint(scaled));
    }
  }
  return row;
}

using Rows = std::vector<Quantized>;

Rows quantized_a(const GemmArgs& g) {
  Rows rows;
  for (int64_t i = 0; is_int8(g.in_dtype) && i < g.m; ++i)
    rows.push_back(quantize(
        g.k, [&](int64_t p) { return a_element(g, i, p); }, g.random_rounding,
        [&](int64_t p) { return static_cast<uint32_t>(i * g.a_row + p * g.a_col); }));
  return rows;
}

Rows quantized_b(const GemmArgs& g) {
  Rows columns;
  for (int64_t j = 0; is_int8(g.in_dtype) && j < g.n; ++j)
    columns.push_back(quantize(
        g.k, [&](int64_t p) { return b_element(g, p, j); }, false, [](int64_t) { return 0u; }));
  return columns;
}

float int8_product(const Quantized& a, const Quantized& b) {
  int64_t sum = 0;
  for (size_t p = 0; p < a.q.size(); ++p) sum += int64_t(a.q[p]) * b.q[p];
  const float scaled = float(sum) * a.scale;
  return scaled * b.scale;
}

double product(const GemmArgs& g, int64_t i, int64_t j) {
  double sum = 0;
  if (g.fp16_chunk) {
    for (int64_t p = 0; p < g.k; p += g.fp16_chunk)
      sum += chunk_in_fp16(g, i, j, p, std::min(g.k, p + g.fp16_chunk));
  } else {
    for (int64_t p = 0; p < g.k; ++p) sum += double(a_element(g, i, p)) * b_element(g, p, j);
  }
  return sum;
}

// product: of the sum over k.
void element(const GemmArgs& g, int64_t i, int64_t j, double product) {
  double v = product + (g.reads_c() ? get(g.c, g.out_dtype, i * g.c_row + j) : 0);
  if (g.bias) v += get(g.bias, g.out_dtype, j);
  if (g.pre) put(g.pre, g.out_dtype, i * g.pre_row + j, float(v));
  if (g.activation_input) {
    v *= activation_slope(g.activation,
                          get(g.activation_input, g.out_dtype, i * g.activation_input_row + j));
  } else {
    v = activation(g.activation, v);
  }
  if (g.residual) v += get(g.residual, g.out_dtype, i * g.residual_row + j);
  put(g.c, g.out_dtype, i * g.c_row + j, float(v));
}

}  // namespace

void gemm(const GemmArgs& g) {
  const Rows a = quantized_a(g), b = quantized_b(g);
  for (int64_t i = 0; i < g.m; ++i) {
    for (int64_t j = 0; j < g.n; ++j)
      element(g, i, j, is_int8(g.in_dtype) ? int8_product(a[i], b[j]) : product(g, i, j));
    if (!g.a_sums) continue;
    double sum = g.a_sums[i];
    for (int64_t p = 0; p < g.k; ++p) sum += a_element(g, i, p);
    g.a_sums[i] = float(sum);
  }
}

void grouped_linear_forward(const GroupedGemmArgs& all) {
  int64_t start = 0;
  for (int64_t i = 0; i < all.groups; ++i) {
    GemmArgs g = all.each;
    (all.sums ? g.k : g.m) = all.counts[i];
    const int64_t in_bytes = element_bytes(g.in_dtype), out_bytes = element_bytes(g.out_dtype);
    g.a = static_cast<const char*>(g.a) + start * (all.sums ? g.a_col : g.a_row) * in_bytes;
    g.b = static_cast<const char*>(g.b) +
          (all.sums ? start * g.b_row : i * all.weight_step) * (g.b_scales ? 1 : in_bytes);
    if (g.b_scales) g.b_scales.at += i * all.scale_step;
    g.c = static_cast<char*>(g.c) + (all.sums ? i * all.weight_step : start * g.c_row) * out_bytes;
    if (all.counts[i] || (all.sums && g.overwrite)) gemm(g);
    start += all.counts[i];
  }
}

bool has_fp16_arithmetic() { return true; }

bool has_bf16_arithmetic() { return true; }

int64_t packed_weight_size(int64_t n, int64_t k, DType dtype, int64_t) {
  return n * k * element_bytes(dtype);
}

void pack_weight(const GemmPackArgs& args) {
  GemmArgs g = {};
  g.n = args.n, g.in_dtype = args.dtype, g.b = args.b, g.b_row = args.b_row, g.b_col = args.b_col,
  g.b_scales = args.scales;
  for (int64_t p = 0; p < args.k; ++p) {
    for (int64_t j = 0; j < args.n; ++j)
      put(args.packed, stored_dtype(args.dtype), p * args.n + j, b_element(g, p, j));
  }
}

}  // namespace fm::reference
