// Ops of the families philox.h, elementwise.h, reduce.h and adamw.h.
#include <cmath>

#include "driver.h"

namespace fm::driver {
namespace {

void words(Work& w, const Shape& n) {
  const uint32_t* counter = reinterpret_cast<const uint32_t*>(w.input_f32(4 * n[0]));
  uint32_t* out = w.output_u32(4 * n[0]);
  w.run = [=] { kernels().philox4x32(counter, out, n[0], 1234, 5); };
}

void dropout(Work& w, const Shape& n) {
  const void* x = w.input(n[0] * n[1]);
  void* y = w.output(n[0] * n[1]);
  const DropoutArgs args{1, n[0], 1, n[1], 0.1f, {1234, 5, 0, 0, 0}};
  w.run = [=, &w] { kernels().dropout(x, y, w.dtype, args); };
}

void normal(Work& w, const Shape& n) {
  float* out = w.output_f32(n[0] * n[1]);
  const NormalArgs args{n[0], n[1], 0, 0, 1234, 5, 0.02f, 0.0f};
  w.run = [=] { kernels().philox_normal(out, args); };
}

template <Function FUNCTION>
void function_of(Work& w, const Shape& n) {
  float* x = w.input_f32(n[0], 8);
  for (int64_t i = 0; FUNCTION != Function::exp && i < n[0]; ++i) x[i] = x[i] * x[i] + 1e-3f;
  float* y = w.output_f32(n[0]);
  w.run = [=] { kernels().elementwise(FUNCTION, x, y, n[0]); };
}

void convert(Work& w, const Shape& n) {
  const float* x = w.input_f32(n[0]);
  void* y = w.output(n[0]);
  w.sizes.e = sizeof(float);
  w.run = [=, &w] { kernels().convert(x, DType::f32, y, w.dtype, n[0]); };
}

void squared_norm(Work& w, const Shape& n) {
  const void* x = w.input(n[0]);
  float* sum = w.output_f32(1, 0);
  w.run = [=, &w] { *sum = static_cast<float>(kernels().squared_norm(x, w.dtype, n[0])); };
}

void sum_rows(Work& w, const Shape& n) {
  const void* x = w.input(n[0] * n[1]);
  void* out = w.output(n[1]);
  w.run = [=, &w] { kernels().sum_rows(x, w.dtype, n[0], n[1], n[1], out, w.dtype); };
}

void count_zeros(Work& w, const Shape& n) {
  const void* x = w.input(n[0], 0);
  float* count = w.output_f32(1, 0);
  w.run = [=, &w] { *count = static_cast<float>(kernels().count_zeros(x, w.dtype, n[0])); };
}

// Clears the signs of n elements.
void make_positive(const Moment& moment, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (moment.dtype == DType::bf16) {
      static_cast<bf16*>(moment.data)[i].bits &= 0x7fff;
    } else {
      static_cast<float*>(moment.data)[i] = std::fabs(static_cast<float*>(moment.data)[i]);
    }
  }
}

template <DType MOMENT>
void adamw(Work& w, const Shape& n) {
  float* param = w.updated_f32(n[0]);
  const Moment m{w.updated(n[0], MOMENT, 0.1f), MOMENT}, v{w.updated(n[0], MOMENT, 0.01f), MOMENT};
  make_positive(v, n[0]);
  const float* grad = w.input_f32(n[0]);
  w.sizes.e_avg = w.sizes.e_sq = MOMENT == DType::f32 ? 4 : 2;
  w.sizes.e_out = 0;  // no copy in half precision
  // Elements of the middle columns of a matrix.
  const AdamWArgs args{
      1.0f, 0.999f, 0.1f, 0.95f, 0.05f, 1e-3f, 3.0f, 1e-8f, {1234, 5, 7, 3, 300, 700}};
  w.run = [=] { kernels().adamw(param, grad, m, v, nullptr, DType::f32, n[0], args); };
}

const Register all[] = {
    {{"philox4x32", {4096}, words}},
    {{"philox_normal", {256, 768}, normal}},
    {{"dropout", {256, 768}, dropout}},
    {{"exp", {65536}, function_of<Function::exp>, "elementwise"}},
    {{"log", {65536}, function_of<Function::log>, "elementwise"}},
    {{"sqrt", {65536}, function_of<Function::sqrt>, "elementwise"}},
    {{"rsqrt", {65536}, function_of<Function::rsqrt>, "elementwise"}},
    {{"reciprocal", {65536}, function_of<Function::reciprocal>, "elementwise"}},
    {{"convert", {65536}, convert}},
    {{"squared_norm", {65536}, squared_norm}},
    {{"count_zeros", {65536}, count_zeros}},
    {{"sum_rows", {4, 65536}, sum_rows}},
    {{"adamw", {65536}, adamw<DType::f32>}},
    {{"adamw_bf16_moments", {65536}, adamw<DType::bf16>, "adamw"}},
};

}  // namespace
}  // namespace fm::driver
