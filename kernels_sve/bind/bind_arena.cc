// torch's CPU tensors from the arena: use_arena, arena_stats. The only file that includes torch's headers (c10, for its
// Allocator); setup.py links the libc10 of the torch that is installed.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <new>

#include "arena.h"
#include "bind/tensor_view.h"

namespace fm {
namespace {

struct ArenaAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = arena::allocate(bytes, arena::Use::tensor);
    if (bytes && !data) throw std::bad_alloc();
    return {data, data, &arena::release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &arena::release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

constexpr uint8_t ABOVE_TORCHS_OWN = 1;

bool use_arena(size_t bytes) {
  static bool used = false;
  if (used) return true;
  if (!arena::reserve(bytes)) return false;
  c10::SetCPUAllocator(new ArenaAllocator,
                       ABOVE_TORCHS_OWN);  // torch keeps it for the life of the process
  return used = true;
}

py::dict arena_stats() {
  using namespace py::literals;
  const arena::Stats s = arena::stats();
  return py::dict("reserved"_a = s.reserved, "touched"_a = s.touched, "in_use"_a = s.in_use,
                  "peak"_a = s.peak, "fallbacks"_a = s.fallbacks);
}

}  // namespace

FM_BIND(arena) {
  using namespace py::literals;
  module.def("use_arena", &use_arena, "bytes"_a,
             "Serve torch's large CPU tensors from now on, in the whole process, from memory that "
             "is never returned "
             "(arena.h); `bytes` of\n"
             "addresses are reserved at the first call. False when the system refuses.");
  module.def("arena_stats", &arena_stats,
             "Bytes: reserved (addresses), touched (ever handed out), in_use, peak (of in_use); "
             "fallbacks: large blocks "
             "left to malloc.");
}

}  // namespace fm
