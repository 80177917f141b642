// Yardsticks for the benchmarks: what the machine can do, measured with the same vectors as the kernels. Bound in bind_bench.cc.
// Reference: reference_bench.cc. Used by benchmarks/driver.py.
#pragma once
#include "simd.h"

namespace fm::FM_TARGET {

// 24 independent chains of `steps` multiply-adds on vectors, in every thread; returns the number of floating-point operations.
static double bench_fma(int64_t steps) {
  constexpr int CHAINS = FM_VECTOR_BYTES == 64 || FM_MR * FM_NR_VECTORS >= 24 ? 24 : 12;
  parallel_run([&](int, int) {
    volatile float seed = 0.999f;
    const vf factor = broadcast(seed), term = broadcast(seed * 1e-3f);
    vf chain[CHAINS];  // each from its own start, or the compiler would merge them
#pragma GCC unroll 32
    for (int i = 0; i < CHAINS; ++i) chain[i] = broadcast(seed * static_cast<float>(i));
    for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 32
      for (int i = 0; i < CHAINS; ++i) chain[i] = chain[i] * factor + term;
    }
    vf sum = {};
    for (int i = 0; i < CHAINS; ++i) sum += chain[i];
    seed = hsum(sum);
  });
  return 2.0 * CHAINS * VL * static_cast<double>(steps) * num_threads();
}

// `steps` integer additions, each waiting for the one before: one per cycle of the core's clock.
static int64_t bench_clock(int64_t steps) {
  int64_t sum = steps;
  for (int64_t i = 0; i < steps / 16; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) asm volatile("" : "+r"(++sum));
  }
  return sum;
}

// out = x + factor * y (STREAM triad); bytes moved are 12 n, or 16 n where a store first reads the line.
static void bench_triad(float* out, const float* x, const float* y, float factor, int64_t n) {
  parallel_for(n, 4096, [&](int64_t begin, int64_t end) {
    for_vectors(begin, end, [&](int64_t i, int lanes) {
      store_lanes(out + i, load_lanes(x + i, lanes) + factor * load_lanes(y + i, lanes), lanes);
    });
  });
}

}  // namespace fm::FM_TARGET
