// What every worker thread must set for itself: its core, and that denormal numbers count as zero. Bound in module.cc; tested by
// tests/host/test_placement.py.
#include <sched.h>

#include "parallel.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace fm {
namespace {

// Flush-to-zero, and denormals-are-zero where it is a mode of its own.
void flush_denormals_here(bool on) {
#if defined(__x86_64__)
  constexpr unsigned FLUSH = 0x8040;
  _mm_setcsr(on ? _mm_getcsr() | FLUSH : _mm_getcsr() & ~FLUSH);
#elif defined(__aarch64__)
  constexpr uint64_t FLUSH = (1u << 24) | (1u << 19);  // FPCR.FZ and FPCR.FZ16
  uint64_t control;
  __asm__ volatile("mrs %0, fpcr" : "=r"(control));
  __asm__ volatile("msr fpcr, %0" ::"r"(on ? control | FLUSH : control & ~FLUSH));
#else
  (void)on;
#endif
}

}  // namespace

void flush_denormals(bool on) {
  parallel_run([on](int, int) { flush_denormals_here(on); });
}

std::vector<int> pin_threads(const std::vector<int>& cpus) {
  std::vector<int> places(cpus.size(), -1);
  parallel_run([&](int thread, int) {
    if (thread >= static_cast<int>(cpus.size())) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpus[thread], &set);
    if (!sched_setaffinity(0, sizeof set, &set)) places[thread] = sched_getcpu();
  });
  return places;
}

std::vector<int> thread_cpus() {
  std::vector<int> places(num_threads(), -1);
  parallel_run([&](int thread, int) { places[thread] = sched_getcpu(); });
  return places;
}

}  // namespace fm
