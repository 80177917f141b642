// Ops of the family attention.h, on Megatron's fused layout (S, B, (HEADS + 2 GROUPS) D).
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
  w.run = [=, &w] { kernels().attention_backward(t.qkv, t.out, t.lse, dout, dqkv, w.dtype, t.args); };
}

const Register all[] = {
    {{"attention_forward", "attention_forward", {192, 1, 4, 2, 64, 128}, attention_forward}},
    {{"attention_backward", "attention_backward", {192, 1, 4, 2, 64, 128}, attention_backward}},
};

}  // namespace
}  // namespace fm::driver
