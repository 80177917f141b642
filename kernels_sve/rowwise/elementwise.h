// The hooks of simd.h over whole tensors: elementary functions and conversion between float32, bfloat16 and float16.
// Reference: elementwise_reference.cc. Tested by tests/kernels/test_elementwise.py.
#pragma once
#include "simd/simd.h"

namespace fm::FM_TARGET {

template <class F>
FM_INLINE void map_floats(const float* x, float* out, int64_t n, const F& f) {
  parallel_for(n, Tuning::GRAIN, [&](int64_t begin, int64_t end) {
    for_vectors(begin, end, [&](int64_t i, int lanes) {
      store_lanes(out + i, f(load_lanes(x + i, lanes)), lanes);
    });
  });
}

static void elementwise(Function function, const float* x, float* out, int64_t n) {
  switch (function) {
    case Function::exp:
      return map_floats(x, out, n, [](vf v) { return exp(v); });
    case Function::log:
      return map_floats(x, out, n, [](vf v) { return log(v); });
    case Function::sqrt:
      return map_floats(x, out, n, [](vf v) { return sqrt(v); });
    case Function::rsqrt:
      return map_floats(x, out, n, [](vf v) { return rsqrt(v); });
    case Function::reciprocal:
      return map_floats(x, out, n, [](vf v) { return reciprocal(v); });
  }
}

static void convert(const void* x, DType from, void* out, DType to, int64_t n) {
  with_dtype(from, [&](auto from_element) {
    with_dtype(to, [&](auto to_element) {
      const auto* source = static_cast<const decltype(from_element)*>(x);
      auto* target = static_cast<decltype(to_element)*>(out);
      parallel_for(n, Tuning::GRAIN, [&](int64_t begin, int64_t end) {
        for_vectors(begin, end, [&](int64_t i, int lanes) {
          store_exact(target + i, load_lanes(source + i, lanes), lanes);
        });
      });
    });
  });
}

}  // namespace fm::FM_TARGET
