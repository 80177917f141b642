// What parallel.cc calls of OpenMP, forwarded to the runtime of openmp.h. GCC's functions are also LLVM's and Intel's.
// Tested by tests/packaging/test_setup.py.
#include "extension/openmp.h"

#include "extension/loaded.h"

namespace {

using Task = void (*)(void*);

struct Runtime {
  void (*parallel)(Task, void*, unsigned, unsigned);
  void (*barrier)();
  int (*in_parallel)();
  int (*max_threads)();
  int (*num_threads)();
  int (*thread_num)();
  void (*set_num_threads)(int);
};

Runtime runtime;

void* symbol(const char* name) {
  if (void* found = fm::loaded_symbol("libtorch_cpu.so", name)) return found;
  static void* system = dlopen("libgomp.so.1", RTLD_NOW);
  return system ? dlsym(system, name) : nullptr;
}

template <class F>
bool find(F& function, const char* name) {
  function = reinterpret_cast<F>(symbol(name));
  return function != nullptr;
}

}  // namespace

namespace fm {

bool find_openmp() {
  return find(runtime.parallel, "GOMP_parallel") && find(runtime.barrier, "GOMP_barrier") &&
         find(runtime.in_parallel, "omp_in_parallel") &&
         find(runtime.max_threads, "omp_get_max_threads") &&
         find(runtime.num_threads, "omp_get_num_threads") &&
         find(runtime.thread_num, "omp_get_thread_num") &&
         find(runtime.set_num_threads, "omp_set_num_threads");
}

}  // namespace fm

// Not exported: -fvisibility=hidden.
extern "C" {
void GOMP_parallel(Task task, void* context, unsigned threads, unsigned flags) {
  runtime.parallel(task, context, threads, flags);
}
void GOMP_barrier() { runtime.barrier(); }
int omp_in_parallel() { return runtime.in_parallel(); }
int omp_get_max_threads() { return runtime.max_threads(); }
int omp_get_num_threads() { return runtime.num_threads(); }
int omp_get_thread_num() { return runtime.thread_num(); }
void omp_set_num_threads(int threads) { runtime.set_num_threads(threads); }
}
