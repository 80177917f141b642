// Ops of the families rowwise.h, gate.h, routing.h, rotary.h, cross_entropy.h, activation.h, embedding.h, decode.h and q8.h.
#include "driver.h"

namespace fm::driver {
namespace {

constexpr float EPSILON = 1e-5f;

// A norm's arguments. forward: the run reads the bias of a layer norm and writes y. An RMS norm has neither bias nor mean.
template <bool RMS>
LayerNormArgs norm_of(Work& w, const void* x, int64_t rows, int64_t cols, bool forward) {
  const void *weight = w.input(cols), *bias = RMS ? nullptr : w.input(cols, 1, forward ? ALL : 0);
  void* y = w.output(rows * cols, forward ? ALL : 0);
  float *mean = RMS ? nullptr : w.output_f32(rows), *rstd = w.output_f32(rows);
  return {x, weight, bias, y, mean, rstd, rows, cols, EPSILON, w.dtype};
}

template <bool RMS>
LayerNormGradArgs norm_gradient(Work& w, const LayerNormArgs& x, const void* add) {
  const int64_t n = x.rows * x.cols;
  const void* dy = w.input(n);
  void* dx = w.output(n);
  float *dweight = w.updated_f32(x.cols), *dbias = RMS ? nullptr : w.updated_f32(x.cols);
  return {dy, add, x.x, x.weight, x.mean, x.rstd, dx, dweight, dbias, x.rows, x.cols, w.dtype};
}

template <bool RMS>
void call_norm(const LayerNormArgs& args) {
  RMS ? kernels().rms_norm(args) : kernels().layer_norm(args);
}

template <bool RMS>
void norm(Work& w, const Shape& n) {
  const LayerNormArgs args = norm_of<RMS>(w, w.input(n[0] * n[1]), n[0], n[1], true);
  w.run = [=] { call_norm<RMS>(args); };
}

template <bool RMS>
void norm_backward(Work& w, const Shape& n) {
  const LayerNormArgs forward = norm_of<RMS>(w, w.input(n[0] * n[1]), n[0], n[1], false);
  call_norm<RMS>(forward);
  const LayerNormGradArgs args = norm_gradient<RMS>(w, forward, nullptr);
  w.run = [=] { RMS ? kernels().rms_norm_backward(args) : kernels().layer_norm_backward(args); };
}

DropoutArgs dropout_of(const Shape& n) { return {n[0], n[1], 1, n[2], 0.1f, {1234, 5, 0, 0, 0}}; }

// forward: the run reads x, bias and residual.
ResidualArgs residual_of(Work& w, const Shape& n, bool forward) {
  const int64_t count = n[0] * n[1] * n[2], touched = forward ? ALL : 0;
  return {w.input(count, 1, touched),
          w.input(n[2], 1, touched),
          w.input(count, 1, touched),
          w.output(count),
          w.dtype,
          dropout_of(n)};
}

void bias_dropout_add(Work& w, const Shape& n) {
  const ResidualArgs args = residual_of(w, n, true);
  w.run = [=] { kernels().bias_dropout_add(args); };
}

void bias_dropout_add_backward(Work& w, const Shape& n) {
  const int64_t count = n[0] * n[1] * n[2];
  const ResidualGradArgs args{w.input(count), w.output(count), w.updated_f32(n[2]), w.dtype,
                              dropout_of(n)};
  w.run = [=] { kernels().bias_dropout_add_backward(args); };
}

template <bool RMS>
void call_residual_norm(const ResidualArgs& sum, const LayerNormArgs& norm) {
  RMS ? kernels().bias_dropout_add_rms_norm(sum, norm)
      : kernels().bias_dropout_add_layer_norm(sum, norm);
}

template <bool RMS>
void residual_norm(Work& w, const Shape& n) {
  const ResidualArgs sum = residual_of(w, n, true);
  const LayerNormArgs norm = norm_of<RMS>(w, sum.out, n[0] * n[1], n[2], true);
  w.run = [=] { call_residual_norm<RMS>(sum, norm); };
}

template <bool RMS>
void residual_norm_backward(Work& w, const Shape& n) {
  const int64_t count = n[0] * n[1] * n[2];
  const ResidualArgs sum = residual_of(w, n, false);
  const LayerNormArgs norm = norm_of<RMS>(w, sum.out, n[0] * n[1], n[2], false);
  call_residual_norm<RMS>(sum, norm);
  const LayerNormGradArgs grad = norm_gradient<RMS>(w, norm, w.input(count));
  const ResidualGradArgs residual{grad.dx, w.output(count), w.updated_f32(n[2]), w.dtype,
                                  dropout_of(n)};
  w.run = [=] {
    RMS ? kernels().bias_dropout_add_rms_norm_backward(grad, residual)
        : kernels().bias_dropout_add_layer_norm_backward(grad, residual);
  };
}

// Elements per row of what a cross-entropy kernel reads or writes in addition to the logits: 0 or 1 of each.
struct Touched {
  int64_t labels, row_max, sum_exp, target_logit;
};

CrossEntropyArgs entropy_of(Work& w, const Shape& n, Touched touched) {
  return {w.input(n[0] * n[1], 4),
          w.dtype,
          n[0],
          n[1],
          w.indices(n[0], n[1], touched.labels * n[0]),
          0,
          w.output_f32(n[0], touched.row_max * n[0]),
          w.output_f32(n[0], touched.sum_exp * n[0]),
          w.output_f32(n[0], touched.target_logit * n[0])};
}

void cross_entropy_max(Work& w, const Shape& n) {
  const CrossEntropyArgs args = entropy_of(w, n, {0, 1, 0, 0});
  w.run = [=] { kernels().cross_entropy_max(args); };
}

void cross_entropy_sum(Work& w, const Shape& n) {
  const CrossEntropyArgs args = entropy_of(w, n, {1, 1, 1, 1});
  kernels().cross_entropy_max(args);
  w.run = [=] { kernels().cross_entropy_sum(args); };
}

void cross_entropy_forward(Work& w, const Shape& n) {
  const CrossEntropyArgs args = entropy_of(w, n, {1, 1, 1, 1});
  w.run = [=] { kernels().cross_entropy_forward(args); };
}

void cross_entropy_backward(Work& w, const Shape& n) {
  const CrossEntropyArgs args = entropy_of(w, n, {1, 1, 1, 0});
  kernels().cross_entropy_forward(args);
  const float* dloss = w.input_f32(n[0]);
  void* out = w.output(n[0] * n[1]);
  w.run = [=, &w] { kernels().cross_entropy_backward(args, dloss, out, w.dtype); };
}

void activate(Work& w, const Shape& n) {
  const void *x = w.input(n[0] * n[1], 3), *bias = w.input(n[1]);
  void* y = w.output(n[0] * n[1]);
  w.run = [=, &w] {
    kernels().activate({x, bias, y, n[1], n[0], n[1], w.dtype, Activation::gelu});
  };
}

void activate_backward(Work& w, const Shape& n) {
  const void *dy = w.input(n[0] * n[1]), *x = w.input(n[0] * n[1], 3);
  void* dx = w.output(n[0] * n[1]);
  w.run = [=, &w] {
    kernels().activate_backward({x, nullptr, dx, n[1], n[0], n[1], w.dtype, Activation::gelu}, dy);
  };
}

GateArgs gate_of(Work& w, const Shape& n) {
  return {w.input(2 * n[0] * n[1], 3), 2 * n[1], n[1], n[0], n[1], w.dtype, Activation::silu};
}

void gate(Work& w, const Shape& n) {
  const GateArgs args = gate_of(w, n);
  void* y = w.output(n[0] * n[1]);
  w.run = [=] { kernels().gate(args, y); };
}

void gate_backward(Work& w, const Shape& n) {
  const GateArgs args = gate_of(w, n);
  const GateGradArgs grad{w.input(n[0] * n[1]), w.output(2 * n[0] * n[1]), args.x_row, args.x_part};
  w.run = [=] { kernels().gate_backward(args, grad); };
}

void scaled_gate(Work& w, const Shape& n) {
  GateArgs args = gate_of(w, n);
  args.factors = w.input_f32(n[0]);
  void* y = w.output(n[0] * n[1]);
  w.run = [=] { kernels().gate(args, y); };
}

void scaled_gate_backward(Work& w, const Shape& n) {
  GateArgs args = gate_of(w, n);
  args.factors = w.input_f32(n[0]);
  const GateGradArgs grad{w.input(n[0] * n[1]), w.output(2 * n[0] * n[1]), args.x_row,
                          args.x_part,          w.output_f32(n[0]),        w.output(n[0] * n[1])};
  w.run = [=] { kernels().gate_backward(args, grad); };
}

int64_t* output_i64(Work& w, int64_t n) { return reinterpret_cast<int64_t*>(w.output_u32(2 * n)); }

RouteArgs route_of(Work& w, const Shape& n, bool forward) {
  const int64_t rows = n[0], k = n[1], experts = n[2];
  const float *logits = w.input_f32(rows * experts, 3),
              *bias = forward ? w.input_f32(experts) : nullptr;
  return {logits, bias, rows, experts, k, 0, 0, Scores::sigmoid, 1, 0};
}

void route(Work& w, const Shape& n) {
  const RouteArgs args = route_of(w, n, true);
  float* scores = w.output_f32(n[0] * n[1]);
  int64_t* chosen = output_i64(w, n[0] * n[1]);
  w.run = [=] { kernels().route(args, scores, chosen); };
}

void route_backward(Work& w, const Shape& n) {
  const RouteArgs args = route_of(w, n, false);
  const float* dscores = w.input_f32(n[0] * n[1]);
  const int64_t* chosen = w.indices(n[0] * n[1], n[2]);
  float* dlogits = w.output_f32(n[0] * n[2]);
  w.run = [=] { kernels().route_backward(args, dscores, args.logits, chosen, dlogits); };
}

void sort_pairs(Work& w, const Shape& n) {
  const int64_t count = n[0] * n[1], experts = n[2], *chosen = w.indices(count, experts);
  int64_t *counts = output_i64(w, experts), *pairs = output_i64(w, count),
          *places = output_i64(w, count);
  w.run = [=] { kernels().sort_pairs(chosen, count, experts, counts, pairs, places); };
}

// Of one expert for each token.
void permute(Work& w, const Shape& n) {
  const PermuteArgs args{n[0], n[1], 1, n[2], w.dtype};
  const int64_t* pairs = w.indices(n[1], n[0]);
  const void* x = w.input(n[0] * n[2]);
  void* out = w.output(n[1] * n[2]);
  w.run = [=] { kernels().permute(args, pairs, x, out); };
}

void unpermute(Work& w, const Shape& n) {
  const PermuteArgs args{n[1], n[0], n[2], n[3], w.dtype};
  const int64_t* places = w.indices(n[1] * n[2], n[0]);
  const void* x = w.input(n[0] * n[3]);
  void* out = w.output(n[1] * n[3]);
  w.run = [=] { kernels().unpermute(args, places, x, out); };
}

// All heads but two are one group's queries. norm: with weights.
RotaryArgs rotary_of(Work& w, const Shape& n, bool norm) {
  const int64_t s = n[0], b = n[1], heads = n[2], half = n[3], d = n[4];
  const void *q_weight = norm ? w.input(d) : nullptr, *k_weight = norm ? w.input(d) : nullptr;
  const float *cos = w.input_f32(s * half), *sin = w.input_f32(s * half);
  const void* x = w.input(s * b * heads * d);
  void* y = w.output(s * b * heads * d);
  return {x,     q_weight,  k_weight, cos,  sin,     y,     s,     b,
          heads, heads - 2, d,        half, EPSILON, false, false, w.dtype};
}

template <bool NORM>
void rotary(Work& w, const Shape& n) {
  const RotaryArgs args = rotary_of(w, n, NORM);
  w.run = [=] { kernels().rotary(args); };
}

void rotary_norm_backward(Work& w, const Shape& n) {
  const RotaryArgs args = rotary_of(w, n, true);
  const RotaryGradArgs grad{w.input(n[0] * n[1] * n[2] * n[4]), w.updated_f32(n[4]),
                            w.updated_f32(n[4])};
  w.run = [=] { kernels().rotary_norm_backward(args, grad); };
}

void embedding(Work& w, const Shape& n) {
  const EmbeddingArgs args{w.indices(n[0], n[1]), n[0], 0, n[1], n[2]};
  const void* table = w.input(n[1] * n[2], 1, n[0] * n[2]);
  void* out = w.output(n[0] * n[2]);
  w.run = [=, &w] { kernels().embedding(args, table, out, w.dtype); };
}

void embedding_backward(Work& w, const Shape& n) {
  const EmbeddingArgs args{w.indices(n[0], n[1]), n[0], 0, n[1], n[2]};
  const void* dout = w.input(n[0] * n[2]);
  float* dtable = w.updated_f32(n[1] * n[2], 1, n[0] * n[2]);
  w.run = [=, &w] { kernels().embedding_backward(args, dout, w.dtype, dtable); };
}

void add_position(Work& w, const Shape& n) {
  const int64_t count = n[0] * n[1] * n[2];
  const void *x = w.input(count), *table = w.input(n[0] * n[2]);
  void* out = w.output(count);
  w.run = [=, &w] { kernels().add_position(x, table, out, w.dtype, n[0], n[1], n[2]); };
}

void add_position_backward(Work& w, const Shape& n) {
  const void* dout = w.input(n[0] * n[1] * n[2]);
  float* dtable = w.updated_f32(n[0] * n[2]);
  w.run = [=, &w] { kernels().add_position_backward(dout, w.dtype, dtable, n[0], n[1], n[2]); };
}

void linear_few_rows(Work& w, const Shape& n) {
  FewRowsArgs a{};
  a.m = n[0], a.n = n[1], a.k = n[2], a.dtype = w.dtype;
  a.x = w.input(a.m * a.k), a.x_row = a.k;
  a.weight = w.input(a.n * a.k), a.weight_row = a.k;
  a.bias = w.input(a.n);
  a.out = w.output(a.m * a.n), a.out_row = a.n;
  w.run = [=] { kernels().linear_few_rows(a); };
}

// The values are counted as words of four.
Q8Args q8_of(Work& w, const Shape& n, void* weight) {
  const int64_t rows = n[0], cols = n[1];
  auto* values = reinterpret_cast<int8_t*>(w.output_u32((rows * cols + 3) / 4));
  auto* scales = static_cast<bf16*>(w.output_of(DType::bf16, rows * q8_blocks(cols)));
  return {rows, cols, w.dtype, weight, cols, values, scales};
}

void quantize_q8(Work& w, const Shape& n) {
  const Q8Args a = q8_of(w, n, w.input(n[0] * n[1]));
  w.run = [=] { kernels().quantize_q8(a); };
}

void dequantize_q8(Work& w, const Shape& n) {
  Q8Args a = q8_of(w, n, w.input(n[0] * n[1], 1, 0));
  kernels().quantize_q8(a);
  a.weight = w.output(n[0] * n[1]);
  w.run = [=] { kernels().dequantize_q8(a); };
}

const Register all[] = {
    {{"layer_norm", {256, 768}, norm<false>}},
    {{"layer_norm_backward", {256, 768}, norm_backward<false>}},
    {{"rms_norm", {256, 768}, norm<true>}},
    {{"rms_norm_backward", {256, 768}, norm_backward<true>}},
    {{"bias_dropout_add", {64, 4, 768}, bias_dropout_add}},
    {{"bias_dropout_add_backward", {64, 4, 768}, bias_dropout_add_backward}},
    {{"bias_dropout_add_layer_norm", {64, 4, 768}, residual_norm<false>}},
    {{"bias_dropout_add_layer_norm_backward", {64, 4, 768}, residual_norm_backward<false>}},
    {{"bias_dropout_add_rms_norm", {64, 4, 768}, residual_norm<true>}},
    {{"bias_dropout_add_rms_norm_backward", {64, 4, 768}, residual_norm_backward<true>}},
    {{"cross_entropy_max", {16, 8192}, cross_entropy_max}},
    {{"cross_entropy_sum", {16, 8192}, cross_entropy_sum}},
    {{"cross_entropy_forward", {16, 8192}, cross_entropy_forward}},
    {{"cross_entropy_backward", {16, 8192}, cross_entropy_backward}},
    {{"activate", {64, 3072}, activate}},
    {{"activate_backward", {64, 3072}, activate_backward}},
    {{"gate", {64, 2048}, gate}},
    {{"gate_backward", {64, 2048}, gate_backward}},
    {{"scaled_gate", {64, 2048}, scaled_gate}},
    {{"scaled_gate_backward", {64, 2048}, scaled_gate_backward}},
    {{"route", {256, 8, 128}, route}},
    {{"route_backward", {256, 8, 128}, route_backward}},
    {{"sort_pairs", {256, 8, 128}, sort_pairs}},
    {{"permute", {256, 2048, 768}, permute}},
    {{"unpermute", {2048, 256, 8, 768}, unpermute}},
    {{"rotary", {64, 4, 6, 32, 64}, rotary<false>}},
    {{"rotary_norm", {64, 4, 6, 32, 64}, rotary<true>}},
    {{"rotary_norm_backward", {64, 4, 6, 32, 64}, rotary_norm_backward}},
    {{"embedding", {256, 1024, 768}, embedding}},
    {{"embedding_backward", {256, 1024, 768}, embedding_backward}},
    {{"add_position", {64, 4, 768}, add_position}},
    {{"add_position_backward", {64, 4, 768}, add_position_backward}},
    {{"linear_few_rows", {1, 256, 768}, linear_few_rows}},
    {{"quantize_q8", {64, 768}, quantize_q8}},
    {{"dequantize_q8", {64, 768}, dequantize_q8}},
};

}  // namespace
}  // namespace fm::driver
