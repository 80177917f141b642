// Ops of the family attention.h, on Megatron's fused layout (S, B, HEADS * 3 * D).
#include "driver.h"

namespace fm::driver {
namespace {

struct Tensors {
  AttentionArgs args;
  const void* qkv;
  void* out;
  float* lse;
};

Tensors prepare(Work& w, const Shape& n) {
  const int64_t context = n[0] * n[1] * n[2] * n[3];
  return {{n[0], n[1], n[2], n[3], 0.1f, 1234, 5, 0, 0},
          w.input(3 * context, 2),
          w.output(context),
          w.output_f32(n[0] * n[1] * n[2])};
}

void attention_forward(Work& w, const Shape& n) {
  const Tensors t = prepare(w, n);
  w.run = [t, &w] { kernels().attention_forward(t.qkv, t.out, t.lse, w.dtype, t.args); };
}

void attention_backward(Work& w, const Shape& n) {
  const Tensors t = prepare(w, n);
  const int64_t context = n[0] * n[1] * n[2] * n[3];
  const void* dout = w.input(context);
  void* dqkv = w.output(3 * context);
  kernels().attention_forward(t.qkv, t.out, t.lse, w.dtype, t.args);
  w.run = [=, &w] { kernels().attention_backward(t.qkv, t.out, t.lse, dout, dqkv, w.dtype, t.args); };
}

const Register all[] = {
    {{"attention_forward", "attention_forward", {192, 1, 2, 64}, attention_forward}},
    {{"attention_backward", "attention_backward", {192, 1, 2, 64}, attention_backward}},
};

}  // namespace
}  // namespace fm::driver
