// Ops of the family delta_net.h.
#include <cmath>

#include "driver.h"

namespace fm::driver {
namespace {

constexpr float EPSILON = 1e-5f;

// Log decays, at most 0.
float* decays(Work& w, int64_t n) {
  float* values = w.input_f32(n);
  for (int64_t i = 0; i < n; ++i) values[i] = -std::fabs(values[i]);
  return values;
}

int64_t groups_of(int64_t cols, int64_t heads, int64_t d, int64_t dv) {
  return (cols - heads * dv) / (2 * d);
}

struct Rule {
  DeltaArgs args;
  float* states;
};

// n: s, b, cols, heads, d, dv. Of the states those of whole segments count.
Rule rule_of(Work& w, const Shape& n) {
  const int64_t gates = n[0] * n[1] * n[3], state = n[1] * n[3] * n[4] * n[5],
                segments = (n[0] + DELTA_SEGMENT - 1) / DELTA_SEGMENT;
  float* states = w.output_f32((segments + 1) * state, segments * state);
  return {
      {n[0], n[1], groups_of(n[2], n[3], n[4], n[5]), n[3], n[4], n[5], w.input(n[0] * n[1] * n[2]),
       decays(w, gates), w.input_f32(gates), w.dtype, nullptr, states},
      states};
}

void delta_rule_forward(Work& w, const Shape& n) {
  const Rule rule = rule_of(w, n);
  void* out = w.output(n[0] * n[1] * n[3] * n[5]);
  w.run = [=] { kernels().delta_rule_forward(rule.args, out, rule.states); };
}

void delta_rule_backward(Work& w, const Shape& n) {
  const Rule rule = rule_of(w, n);
  const int64_t results = n[0] * n[1] * n[3] * n[5], gates = n[0] * n[1] * n[3];
  kernels().delta_rule_forward(rule.args, w.memory(results * 4), rule.states);
  const void* dout = w.input(results);
  void* dqkv = w.output(n[0] * n[1] * n[2]);
  float *ddecay = w.output_f32(gates), *dbeta = w.output_f32(gates),
        *dstate = w.output_f32(n[1] * n[3] * n[4] * n[5], 0);
  w.run = [=] { kernels().delta_rule_backward(rule.args, {dout, dqkv, ddecay, dbeta, dstate}); };
}

const int64_t* samples_of(Work& w, int64_t rows) {
  auto* samples = const_cast<int64_t*>(w.indices(rows, 1));
  for (int64_t row = 0; row < rows; ++row) samples[row] = row;
  return samples;
}

void delta_rule_decode(Work& w, const Shape& n) {
  const int64_t rows = n[0], gates = rows * n[2];
  const DeltaArgs args{1,
                       rows,
                       groups_of(n[1], n[2], n[3], n[4]),
                       n[2],
                       n[3],
                       n[4],
                       w.input(rows * n[1]),
                       decays(w, gates),
                       w.input_f32(gates),
                       w.dtype};
  const int64_t* samples = samples_of(w, rows);
  float* states = w.updated_f32(rows * n[2] * n[3] * n[4]);
  void* out = w.output(rows * n[2] * n[4]);
  w.run = [=] { kernels().delta_rule_decode(args, samples, states, out); };
}

ConvolutionArgs convolution_of(Work& w, int64_t s, int64_t b, int64_t cols, int64_t taps) {
  return {s, b, cols, taps, w.input(s * b * cols), cols, w.input(cols * taps), nullptr, w.dtype};
}

void convolution_forward(Work& w, const Shape& n) {
  const ConvolutionArgs args = convolution_of(w, n[0], n[1], n[2], n[3]);
  void* y = w.output(n[0] * n[1] * n[2]);
  w.run = [=] { kernels().convolution_forward(args, y); };
}

void convolution_backward(Work& w, const Shape& n) {
  const ConvolutionArgs args = convolution_of(w, n[0], n[1], n[2], n[3]);
  const int64_t count = n[0] * n[1] * n[2];
  const ConvolutionGradArgs grad{w.input(count), w.output(count), nullptr,
                                 w.updated_f32(n[2] * n[3])};
  w.run = [=] { kernels().convolution_backward(args, grad); };
}

void convolution_decode(Work& w, const Shape& n) {
  const ConvolutionArgs args = convolution_of(w, 1, n[0], n[1], n[2]);
  const int64_t* samples = samples_of(w, n[0]);
  void *inputs = w.updated(n[0] * (n[2] - 1) * n[1], w.dtype, 1), *y = w.output(n[0] * n[1]);
  w.run = [=] { kernels().convolution_decode(args, samples, inputs, y); };
}

GatedNormArgs norm_of(Work& w, const Shape& n) {
  const int64_t count = n[0] * n[1] * n[2];
  return {n[0] * n[1], n[1],          n[2],    w.input(count), w.input(count),
          n[1] * n[2], w.input(n[2]), EPSILON, w.dtype};
}

void gated_norm(Work& w, const Shape& n) {
  const GatedNormArgs args = norm_of(w, n);
  void* y = w.output(n[0] * n[1] * n[2]);
  w.run = [=] { kernels().gated_norm(args, y); };
}

void gated_norm_backward(Work& w, const Shape& n) {
  const GatedNormArgs args = norm_of(w, n);
  const int64_t count = n[0] * n[1] * n[2];
  const GatedNormGradArgs grad{w.input(count), w.output(count), w.output(count),
                               w.updated_f32(n[2])};
  w.run = [=] { kernels().gated_norm_backward(args, grad); };
}

const Register all[] = {
    {{"delta_rule_forward", {256, 1, 160, 4, 16, 24}, delta_rule_forward}},
    {{"delta_rule_backward", {256, 1, 160, 4, 16, 24}, delta_rule_backward}},
    {{"delta_rule_decode", {2, 160, 4, 16, 24}, delta_rule_decode}},
    {{"convolution_forward", {64, 2, 256, 4}, convolution_forward}},
    {{"convolution_backward", {64, 2, 256, 4}, convolution_backward}},
    {{"convolution_decode", {2, 256, 4}, convolution_decode}},
    {{"gated_norm", {64, 4, 128}, gated_norm}},
    {{"gated_norm_backward", {64, 4, 128}, gated_norm_backward}},
};

}  // namespace
}  // namespace fm::driver
