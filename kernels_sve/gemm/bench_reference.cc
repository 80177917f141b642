// Scalar counterparts of bench.h.
#include "reference.h"

namespace fm::reference {

double bench_fma(int64_t steps, bool) {
  volatile float seed = 0.999f;
  const float factor = seed, term = seed * 1e-3f;
  float chain = 0;
  for (int64_t step = 0; step < steps; ++step) chain = chain * factor + term;
  seed = chain;
  return 2.0 * static_cast<double>(steps);
}

int64_t bench_clock(int64_t steps) {
  int64_t sum = 0;
  for (int64_t i = 0; i < steps; ++i) asm volatile("" : "+r"(++sum));
  return sum;
}

void bench_triad(float* out, const float* x, const float* y, float factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] + factor * y[i];
}

void bench_gemm_panel(const float* a, const float* b, float* c, int64_t m, int64_t n, int64_t k,
                      int64_t sweeps) {
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = 0;
      for (int64_t p = 0; p < k; ++p) sum += static_cast<double>(a[i * k + p]) * b[p * n + j];
      c[i * n + j] = static_cast<float>(sum * static_cast<double>(sweeps));
    }
  }
}

}  // namespace fm::reference
