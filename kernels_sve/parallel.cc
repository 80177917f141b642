// OpenMP behind parallel.h: the only file compiled with -fopenmp. Tested by tests/kernels/test_dispatch.py.
#include "parallel.h"

#include <omp.h>

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "arena/arena.h"
#include "tuning.h"

namespace fm {

int num_threads() { return omp_get_max_threads(); }
void set_num_threads(int threads) { omp_set_num_threads(threads); }

void barrier() {
#pragma omp barrier
}

namespace {

constexpr size_t LINE = tuning::Baseline::CACHE_LINE;

struct Buffer {
  std::unique_ptr<void, decltype(&arena::release)> data{nullptr, &arena::release};
  size_t bytes = 0;
};

// A parallel region inside another would start threads beyond the ones the user asked for.
int team_size(int64_t tasks) {
  if (omp_in_parallel()) return 1;
  return static_cast<int>(std::min<int64_t>(std::max<int64_t>(tasks, 1), omp_get_max_threads()));
}

}  // namespace

void* scratch(int slot, size_t bytes) {
  static thread_local Buffer buffers[8];
  Buffer& buffer = buffers[slot];
  if (buffer.bytes < bytes) {
    buffer.data.reset();
    buffer.bytes = (bytes + LINE - 1) / LINE * LINE;
    buffer.data.reset(arena::allocate(buffer.bytes, arena::Use::buffer));
    if (!buffer.data) {
      buffer.bytes = 0;
      throw std::bad_alloc();
    }
  }
  return buffer.data.get();
}

namespace detail {

void run_ranges(int64_t n, int64_t grain, void (*task)(void*, int64_t, int64_t), void* context) {
  if (n <= 0) return;
  const int64_t grains = (n + grain - 1) / grain;
  const int threads = team_size(grains);
  if (threads == 1) return task(context, 0, n);
#pragma omp parallel num_threads(threads)
  {
    // The runtime may give fewer threads than asked for, so the partition counts the ones that came.
    const int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
    const int64_t begin = grains * thread / team * grain,
                  end = std::min(n, grains * (thread + 1) / team * grain);
    if (begin < end) task(context, begin, end);
  }
}

void run_threads(void (*task)(void*, int, int), void* context) {
  const int threads = team_size(omp_get_max_threads());
#pragma omp parallel num_threads(threads)
  task(context, omp_get_thread_num(), omp_get_num_threads());
}

double sum_chunks(int64_t n, double (*task)(void*, int64_t, int64_t), void* context) {
  const int64_t chunks = (n + SUM_CHUNK - 1) / SUM_CHUNK;
  std::vector<double> partial(static_cast<size_t>(chunks));
  auto range = [&](int64_t first, int64_t last) {
    for (int64_t c = first; c < last; ++c)
      partial[c] = task(context, c * SUM_CHUNK, std::min(n, (c + 1) * SUM_CHUNK));
  };
  parallel_for(chunks, 1, range);
  double total = 0;
  for (double value : partial) total += value;
  return total;
}

}  // namespace detail
}  // namespace fm
