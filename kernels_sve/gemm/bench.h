// Yardsticks for the benchmarks: what the machine can do, measured with the same vectors as the kernels. Bound in
// bench_bind.cc. Reference: bench_reference.cc. Used by benchmarks/driver.py.
#pragma once
#include "gemm/gemm.h"

namespace fm::FM_TARGET {

// Independent chains of `steps` calls of `next`, in every thread; returns how many calls that is in all.
template <class V, class F>
FM_INLINE double run_chains(int64_t steps, const F& next) {
  constexpr int CHAINS = Tuning::FMA_CHAINS;
  parallel_run([&](int, int) {
    volatile float seed = 0.999f;
    V chain[CHAINS];  // each from its own start, or the compiler would merge them
#pragma GCC unroll 32
    for (int i = 0; i < CHAINS; ++i) chain[i] = (V)broadcast(seed * static_cast<float>(i));
    const vf factor = broadcast(seed), term = broadcast(seed * 1e-3f);
    for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 32
      for (int i = 0; i < CHAINS; ++i) chain[i] = next(chain[i], factor, term);
    }
    V sum = {};
    for (int i = 0; i < CHAINS; ++i) sum += chain[i];
    seed = hsum((vf)sum);
  });
  return static_cast<double>(CHAINS) * static_cast<double>(steps) * num_threads();
}

// The same with tiles of int8: the four sums of a step in turn, from operands that stay in tiles.
#ifdef FM_HAS_TILES
static double run_tiles(int64_t steps) {
  parallel_run([&](int, int) {
    tiles_begin();
    alignas(64) uint32_t words[TILE_WORDS] = {};
    zero_sums<2>();
    tile_load<4>(words, 64), tile_load<5>(words, 64);
    tile_load<6>(words, 64), tile_load<7>(words, 64);
    for (int64_t step = 0; step < steps; ++step) {
      tile_dot<true, 0, 4, 6>(), tile_dot<true, 1, 4, 7>();
      tile_dot<true, 2, 5, 6>(), tile_dot<true, 3, 5, 7>();
    }
    tiles_end();
  });
  return 4.0 * TILE_WORDS * TILE * 4 * static_cast<double>(steps) * num_threads();
}
#endif

// Multiply-adds from registers: of floats, or of the numbers that INT8 matmuls multiply. Returns the number of operations, two for
// each.
static double bench_fma(int64_t steps, bool int8) {
  if (!int8) {
    const auto next = [](vf chain, vf factor, vf term)
                          FM_INLINE_LAMBDA { return chain * factor + term; };
    return 2 * VL * run_chains<vf>(steps, next);
  }
#ifdef FM_HAS_TILES
  return 2 * run_tiles(steps);
#elif defined(FM_HAS_BYTE_QUADS)
  const auto next = [](vi chain, vf factor, vf term) FM_INLINE_LAMBDA {
    return multiply_byte_quads(chain, (vu)factor, (vu)term);
  };
  return 2 * VL * 8 * run_chains<vi>(steps, next);
#else
  const auto next = [](vi chain, [[maybe_unused]] vf factor, vf term) FM_INLINE_LAMBDA {
#ifdef FM_HAS_BYTE_DOTS
    return dot_bytes(chain, (vu)factor, (vu)term);
#else
    return dot_shorts(chain, (vu)chain, (vu)term);  // else the products would leave the loop
#endif
  };
  return 2 * VL * Int8Words::STEP * run_chains<vi>(steps, next);
#endif
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
