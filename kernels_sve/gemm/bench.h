// Yardsticks for the benchmarks: what the machine can do, measured with the same vectors as the kernels. Bound in
// bind_bench.cc. Reference: reference_bench.cc. Used by benchmarks/driver.py.
#pragma once
#include "gemm/gemm.h"

namespace fm::FM_TARGET {

// Independent chains of `steps` multiply-adds on vectors, in every thread; returns the number of floating-point
// operations.
static double bench_fma(int64_t steps) {
  constexpr int CHAINS = Tuning::FMA_CHAINS;
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

// `steps` integer additions, each waiting for the one before: one per cycle of the core's clock. What is added is in a register,
// because Intel's cores from Golden Cove on fold chains of immediates while they rename registers.
static int64_t bench_clock(int64_t steps) {
  int64_t sum = steps, one = 1;
  asm volatile("" : "+r"(one));
  for (int64_t i = 0; i < steps / 16; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < 16; ++j) asm volatile("" : "+r"(sum += one));
  }
  return sum;
}

// out = x + factor * y (STREAM triad); bytes moved are 12 n, or 16 n where a store first reads the line.
static void bench_triad(float* out, const float* x, const float* y, float factor, int64_t n) {
  parallel_for(n, Tuning::GRAIN, [&](int64_t begin, int64_t end) {
    for_vectors(begin, end, [&](int64_t i, int lanes) {
      store_lanes(out + i, load_lanes(x + i, lanes) + factor * load_lanes(y + i, lanes), lanes);
    });
  });
}

// c(m, n) = sweeps * a(m, k) b(k, n) by the micro-kernel alone: packed once, then `sweeps` times added to C, on one thread.
static void bench_gemm_panel(const float* a, const float* b, float* c, int64_t m, int64_t n,
                             int64_t k, int64_t sweeps) {
  const int64_t rows = ceil_div(m, MR) * MR, cols = ceil_div(n, NR) * NR;
  float* a_panels = static_cast<float*>(scratch(0, (rows * k + VL) * sizeof(float)));
  float* b_panels = static_cast<float*>(scratch(1, cols * k * sizeof(float)));
  float* sums = static_cast<float*>(scratch(2, rows * cols * sizeof(float)));
  pack<FloatWords, MR>(a, k, 1, 0, m, m, k, a_panels);
  pack<FloatWords, NR>(b, 1, n, 0, n, n, k, b_panels);
  for (int64_t i = 0; i < rows * cols; ++i) sums[i] = 0;
  for (int64_t sweep = 0; sweep < sweeps; ++sweep) {
    for (int64_t j = 0; j < n; j += NR) {
      for (int64_t i = 0; i < m; i += MR) {
        float* tile = sums + i * cols + j;
        Fetches fetches = {tile_rows_at(tile, cols, NR)};
        micro_kernel<FloatWords, MR>(k, a_panels + i * k, b_panels + j * k, tile, cols, true,
                                     fetches);
      }
    }
  }
  for (int64_t i = 0; i < m; ++i)
    for_vectors(0, n, [&](int64_t j, int lanes) {
      store_lanes(c + i * n + j, load_lanes(sums + i * cols + j, lanes), lanes);
    });
}

}  // namespace fm::FM_TARGET
