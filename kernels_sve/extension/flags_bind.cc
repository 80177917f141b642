// Python functions for memory that processes share: set_flag, wait_for_flags. What was written before a flag was set is there
// for who has seen the flag. Tested by tests/comm/test_mpi.py.
#include <sched.h>

#include <chrono>

#include "extension/tensor_view.h"

namespace fm {
namespace {

bool reached(const TensorView& flags, int64_t value) {
  for (int64_t i = 0; i < flags.size(0); ++i) {
    if (__atomic_load_n(flags.data<int64_t>() + i * flags.stride(0), __ATOMIC_ACQUIRE) < value)
      return false;
  }
  return true;
}

bool wait_for_flags(py::handle object, int64_t value, double seconds) {
  constexpr int TURNS = 64;
  TensorView flags("flags", object);
  flags.dtype({DType::i64}).rank(2).last_contiguous();
  if (reached(flags, value)) return true;
  return unlocked([&] {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (std::chrono::steady_clock::now() < end) {
      for (int turn = 0; turn < TURNS; ++turn) {
        if (reached(flags, value)) return true;
      }
      sched_yield();  // with more ranks than cores another rank may have to move first
    }
    return reached(flags, value);
  });
}

}  // namespace

FM_BIND(flags) {
  using namespace py::literals;
  module.def(
      "set_flag",
      [](py::handle object, int64_t index, int64_t value) {
        TensorView flags("flags", object);
        flags.dtype({DType::i64}).rank(2).last_contiguous();
        require(0 <= index && index < flags.size(0), "index", "a row of flags",
                std::to_string(index));
        __atomic_store_n(flags.data<int64_t>() + index * flags.stride(0), value, __ATOMIC_RELEASE);
      },
      "flags"_a, "index"_a, "value"_a,
      "flags[index, 0] = value. flags (p, _) int64: a row, at least a cache line, per process.");
  module.def("wait_for_flags", &wait_for_flags, "flags"_a, "value"_a, "seconds"_a,
             "Whether flags[i, 0] >= value for every i, after waiting for that for at most so many "
             "seconds.");
}

}  // namespace fm
