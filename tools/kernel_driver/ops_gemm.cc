// Ops of the families gemm.h and bench.h. M, N, K are those of the matmul: C (M, N) = A (M, K) B (K, N).
#include "driver.h"

namespace fm::driver {
namespace {

GemmArgs shape_of(const Work& w, const Shape& n) {
  GemmArgs g{};
  g.m = n[0], g.n = n[1], g.k = n[2];
  g.in_dtype = w.operands, g.out_dtype = w.dtype;
  g.c_row = g.n;
  g.fp16_chunk = w.fp16_chunk;
  return g;
}

void set_run(Work& w, const GemmArgs& g) {
  w.run = [g] { kernels().gemm(g); };
}

// Forward: Y = X W^T, both operands with contiguous k.
GemmArgs forward(Work& w, const Shape& n) {
  GemmArgs g = shape_of(w, n);
  g.a = w.input(g.m * g.k), g.a_row = g.k, g.a_col = 1;
  g.b = w.input(g.n * g.k), g.b_row = 1, g.b_col = g.k;
  g.c = w.output(g.m * g.n);
  return g;
}

void gemm_nt(Work& w, const Shape& n) { set_run(w, forward(w, n)); }

// The same with the weight packed before.
void gemm_nt_packed(Work& w, const Shape& n) {
  GemmArgs g = forward(w, n);
  void* packed = w.memory(kernels().packed_weight_size(g.n, g.k, w.operands, g.fp16_chunk));
  kernels().pack_weight({g.n, g.k, w.operands, g.b, g.b_row, g.b_col, packed, g.fp16_chunk});
  g.packed = packed;
  set_run(w, g);
}

// The same with bias and GELU, which also keeps what GELU saw.
void gemm_nt_bias_gelu(Work& w, const Shape& n) {
  GemmArgs g = forward(w, n);
  g.bias = w.input(g.n, 1, 0);
  g.pre = w.output(g.m * g.n, 0), g.pre_row = g.n;
  g.activation = Activation::gelu;
  set_run(w, g);
}

// Data gradient: dX = dY W.
void gemm_nn(Work& w, const Shape& n) {
  GemmArgs g = shape_of(w, n);
  g.a = w.input(g.m * g.k), g.a_row = g.k, g.a_col = 1;
  g.b = w.input(g.k * g.n), g.b_row = g.n, g.b_col = 1;
  g.c = w.output(g.m * g.n);
  set_run(w, g);
}

// Weight gradient: dW += dY^T X into float32, and the bias gradient.
void gemm_tn(Work& w, const Shape& n) {
  GemmArgs g = shape_of(w, n);
  g.a = w.input(g.k * g.m), g.a_row = 1, g.a_col = g.m;
  g.b = w.input(g.k * g.n), g.b_row = g.n, g.b_col = 1;
  g.c = w.updated_f32(g.m * g.n), g.out_dtype = DType::f32, g.accumulate = true;
  g.a_sums = w.updated_f32(g.m), w.sizes.e_out = sizeof(float);
  set_run(w, g);
}

// Matmuls of n[3] groups of rows, as equal as they can be, with a weight each.
void set_grouped_run(Work& w, const GemmArgs& each, const Shape& n, int64_t rows, bool sums) {
  auto counts = std::make_shared<std::vector<int64_t>>();
  w.indices(n[3], 1);  // what is read of them
  for (int64_t i = 0; i < n[3]; ++i) counts->push_back(rows * (i + 1) / n[3] - rows * i / n[3]);
  w.run = [=] {
    kernels().grouped_linear_forward(
        {each, n[3], counts->data(), sums ? n[0] * n[1] : n[1] * n[2], sums});
  };
}

void grouped_nt(Work& w, const Shape& n) {
  GemmArgs g = shape_of(w, n);
  g.a = w.input(g.m * g.k), g.a_row = g.k, g.a_col = 1;
  g.b = w.input(n[3] * g.n * g.k), g.b_row = 1, g.b_col = g.k;
  g.c = w.output(g.m * g.n);
  set_grouped_run(w, g, n, g.m, false);
}

void grouped_nn(Work& w, const Shape& n) {
  GemmArgs g = shape_of(w, n);
  g.a = w.input(g.m * g.k), g.a_row = g.k, g.a_col = 1;
  g.b = w.input(n[3] * g.k * g.n), g.b_row = g.n, g.b_col = 1;
  g.c = w.output(g.m * g.n);
  set_grouped_run(w, g, n, g.m, false);
}

void grouped_tn(Work& w, const Shape& n) {
  GemmArgs g = shape_of(w, n);
  g.a = w.input(g.k * g.m), g.a_row = 1, g.a_col = g.m;
  g.b = w.input(g.k * g.n), g.b_row = g.n, g.b_col = 1;
  g.c = w.updated_f32(n[3] * g.m * g.n), g.out_dtype = DType::f32, g.accumulate = true;
  w.sizes.e_out = sizeof(float);
  set_grouped_run(w, g, n, g.k, true);
}

// A weight (N, K) packed for the forward matmul; the checksum is that of one row times it.
void pack_weight(Work& w, const Shape& n) {
  GemmArgs g = shape_of(w, {1, n[0], n[1]});
  g.a = w.input(g.k, 1, 0), g.a_row = g.k, g.a_col = 1;
  g.c = w.output(g.n, 0);
  const int64_t count = g.n * g.k;
  const void* weight = w.input(count, 1, 2 * count);  // read, and written packed
  void* packed = w.memory(kernels().packed_weight_size(g.n, g.k, w.operands, g.fp16_chunk));
  w.run = [=, &w] {
    kernels().pack_weight({g.n, g.k, w.operands, weight, 1, g.k, packed, w.fp16_chunk});
  };
  g.packed = packed;
  w.after = [g] { kernels().gemm(g); };
}

// Packed once, then SWEEPS times C += A B by the micro-kernel alone: from L1 when bytes and the tile's shape allow it.
void gemm_panel(Work& w, const Shape& n) {
  const float *a = w.input_f32(n[0] * n[2]), *b = w.input_f32(n[2] * n[1]);
  float* c = w.output_f32(n[0] * n[1]);
  w.run = [=] { kernels().bench_gemm_panel(a, b, c, n[0], n[1], n[2], n[3]); };
}

template <bool INT8>
void fma(Work& w, const Shape& n) {
  float* flops = w.output_f32(1, 0);
  w.run = [=, &w] { *flops = static_cast<float>(w.flops = kernels().bench_fma(n[0], INT8)); };
}

void triad(Work& w, const Shape& n) {
  const float *x = w.input_f32(n[0]), *y = w.input_f32(n[0]);
  float* out = w.output_f32(n[0]);
  w.run = [=] { kernels().bench_triad(out, x, y, 3.0f, n[0]); };
}

const Register all[] = {
    {{"gemm_nt", {96, 128, 256}, gemm_nt, "linear_forward"}},
    {{"gemm_nt_packed", {96, 128, 256}, gemm_nt_packed, "linear_forward"}},
    {{"gemm_nt_bias_gelu", {96, 128, 256}, gemm_nt_bias_gelu, "linear_forward"}},
    {{"gemm_nn", {96, 128, 256}, gemm_nn, "linear_data_gradient"}},
    {{"gemm_tn", {96, 128, 256}, gemm_tn, "linear_weight_gradient"}},
    {{"grouped_nt", {96, 128, 256, 3}, grouped_nt, "grouped_linear_forward"}},
    {{"grouped_nn", {96, 128, 256, 3}, grouped_nn, "grouped_linear_data_gradient"}},
    {{"grouped_tn", {96, 128, 256, 3}, grouped_tn, "grouped_linear_weight_gradient"}},
    {{"pack_weight", {128, 256}, pack_weight}},
    {{"gemm_panel", {24, 32, 256, 16}, gemm_panel, "bench_gemm_panel"}},
    {{"fma_peak", {10000}, fma<false>, "bench_fma"}},
    {{"fma_peak_int8", {10000}, fma<true>, "bench_fma"}},
    {{"triad", {65536}, triad, "bench_triad"}},
};

}  // namespace
}  // namespace fm::driver
