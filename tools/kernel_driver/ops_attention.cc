// Ops of the family attention.h, on Megatron's fused layout (S, B, (HEADS + 2 GROUPS) D).
#include <algorithm>

#include "driver.h"

namespace fm::driver {
namespace {

struct Tensors {
  AttentionArgs args;
  const void* qkv;
  void* out;
  float* lse;
};

int64_t qkv_elements(const Shape& n) { return n[0] * n[1] * (n[2] + 2 * n[3]) * n[4]; }
int64_t context_elements(const Shape& n) { return n[0] * n[1] * n[2] * n[4]; }

Tensors prepare(Work& w, const Shape& n) {
  return {{n[0], n[1], n[2], n[3], n[4], n[5], 0.1f, 1234, 5, 0, 0},
          w.input(qkv_elements(n), 2),
          w.output(context_elements(n)),
          w.output_f32(n[0] * n[1] * n[2])};
}

void attention_forward(Work& w, const Shape& n) {
  const Tensors t = prepare(w, n);
  w.run = [t, &w] { kernels().attention_forward(t.qkv, t.out, t.lse, w.dtype, t.args); };
}

void attention_backward(Work& w, const Shape& n) {
  const Tensors t = prepare(w, n);
  const void* dout = w.input(context_elements(n));
  void* dqkv = w.output(qkv_elements(n));
  kernels().attention_forward(t.qkv, t.out, t.lse, w.dtype, t.args);
  w.run = [=, &w] {
    kernels().attention_backward(t.qkv, t.out, t.lse, dout, dqkv, w.dtype, t.args);
  };
}

// The queries of a part see all keys before them.
Tensors prepare_part(Work& w, const Shape& n) {
  const int64_t first_query = n[6], first_key = n[7],
                s = std::max(first_query + n[0], first_key + n[1]);
  AttentionArgs args{s, n[2], n[3], n[4], n[5], NO_WINDOW, 0.1f, 1234, 5, 0, 0};
  args.queries = {first_query, first_query + n[0]}, args.keys = {first_key, first_key + n[1]};
  return {args, w.input(n[0] * n[2] * (n[3] + 2 * n[4]) * n[5], 2),
          w.output(n[0] * n[2] * n[3] * n[5]), w.output_f32(n[0] * n[2] * n[3])};
}

void attention_part_forward(Work& w, const Shape& n) {
  const Tensors t = prepare_part(w, n);
  const void* kv = w.input(n[1] * n[2] * 2 * n[4] * n[5]);
  w.run = [=, &w] { kernels().attention_part_forward(t.qkv, kv, t.out, t.lse, w.dtype, t.args); };
}

void attention_part_backward(Work& w, const Shape& n) {
  const Tensors t = prepare_part(w, n);
  const int64_t keys = n[1] * n[2] * 2 * n[4] * n[5],
                inputs = n[0] * n[2] * (n[3] + 2 * n[4]) * n[5];
  const void *kv = w.input(keys), *dout = w.input(n[0] * n[2] * n[3] * n[5]);
  float *dqkv = w.output_f32(inputs), *dkv = w.output_f32(keys);
  kernels().attention_part_forward(t.qkv, kv, t.out, t.lse, w.dtype, t.args);
  w.run = [=, &w] {
    std::fill_n(dqkv, inputs, 0.0f), std::fill_n(dkv, keys, 0.0f);
    kernels().attention_part_backward(t.qkv, kv, t.out, t.lse, dout, dqkv, dkv, w.dtype, t.args);
  };
}

void attention_decode(Work& w, const Shape& n) {
  const int64_t cache = n[0] * n[2] * n[4] * n[3];
  const void* qkv = w.input(n[0] * (n[1] + 2 * n[2]) * n[3], 2);
  void *keys = w.input(cache), *values = w.input(cache);
  int64_t *samples = const_cast<int64_t*>(w.indices(n[0], 1)),
          *positions = const_cast<int64_t*>(w.indices(n[0], 1));
  for (int64_t row = 0; row < n[0]; ++row)
    samples[row] = row, positions[row] = n[4] + row;  // full caches
  const DecodeArgs args{n[0], n[1], n[2], n[3], n[4], samples, positions};
  void* out = w.output(n[0] * n[1] * n[3]);
  w.run = [=, &w] { kernels().attention_decode(qkv, keys, values, out, w.dtype, args); };
}

const Register all[] = {
    {{"attention_decode", {2, 8, 2, 64, 512}, attention_decode}},
    {{"attention_forward", {192, 1, 4, 2, 64, 128}, attention_forward}},
    {{"attention_backward", {192, 1, 4, 2, 64, 128}, attention_backward}},
    {{"attention_part_forward", {96, 192, 1, 4, 2, 64, 256, 0}, attention_part_forward}},
    {{"attention_part_backward", {96, 192, 1, 4, 2, 64, 256, 0}, attention_part_backward}},
};

}  // namespace
}  // namespace fm::driver
