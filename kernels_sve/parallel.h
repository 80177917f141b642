// Threads: the only file that uses OpenMP\. Kernels hand over a function and a range; parallel.cc, compiled once for the
// baseline, runs it. So the vector targets hold no OpenMP calls and may come from another compiler than the one whose
// runtime torch shares with us.
//
//   parallel_for(n, grain, [&](int64_t begin, int64_t end) {...});      contiguous static ranges, multiples of grain
//   parallel_run([&](int thread, int threads) { ...; barrier(); ... }); one call per thread
//   double s = parallel_sum(n, [&](int64_t begin, int64_t end) {...});  fixed chunks summed in order: the same bits for
//                                                                       any thread count
//   float* a = static_cast<float*>(scratch(0, bytes));                  this thread's own buffer, 256-byte aligned
//
// Inside a parallel region these run on the calling thread alone.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fm {

int num_threads();
void set_num_threads(int threads);

// Of all worker threads of the calling thread (threads.cc). flush_denormals: denormal numbers count as zero, or not.
// pin_threads: thread i to cpus[i]; returns where each then runs, -1 where the system refused. thread_cpus: where they run.
void flush_denormals(bool on);
std::vector<int> pin_threads(const std::vector<int>& cpus);
std::vector<int> thread_cpus();

constexpr int64_t SUM_CHUNK = 65536;

namespace detail {
void run_ranges(int64_t n, int64_t grain, void (*task)(void*, int64_t, int64_t), void* context);
void run_threads(void (*task)(void*, int, int), void* context);
double sum_chunks(int64_t n, double (*task)(void*, int64_t, int64_t), void* context);
}  // namespace detail

// Waits for every thread of the enclosing parallel_run.
void barrier();

// A buffer of the calling thread that lives until the thread's next call with the same slot (0 to 7). Contents are
// undefined.
void* scratch(int slot, size_t bytes);

// F is a lambda of one target's function, so each instance of these templates belongs to that target alone.
template <class F>
inline void parallel_for(int64_t n, int64_t grain, const F& f) {
  detail::run_ranges(
      n, grain,
      [](void* f, int64_t begin, int64_t end) { (*static_cast<const F*>(f))(begin, end); },
      (void*)&f);
}

template <class F>
inline void parallel_run(const F& f) {
  detail::run_threads(
      [](void* f, int thread, int threads) { (*static_cast<const F*>(f))(thread, threads); },
      (void*)&f);
}

template <class F>
inline double parallel_sum(int64_t n, const F& f) {
  return detail::sum_chunks(
      n,
      [](void* f, int64_t begin, int64_t end) { return (*static_cast<const F*>(f))(begin, end); },
      (void*)&f);
}

}  // namespace fm
