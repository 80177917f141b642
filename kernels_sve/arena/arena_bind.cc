// torch's CPU tensors from the arena: use_arena, arena_stats. c10's functions are found in the torch of the process, and
// its Allocator must have the layout of torch_allocator.h.
#include <link.h>

#include <cstring>
#include <new>

#include "arena/arena.h"
#include "extension/loaded.h"
#include "extension/tensor_view.h"
#include "arena/torch_allocator.h"

namespace fm {
namespace {

struct ArenaAllocator final : torch_abi::Allocator {
  torch_abi::DataPtr allocate(size_t bytes) override {
    void* data = arena::allocate(bytes, arena::Use::tensor);
    if (bytes && !data) throw std::bad_alloc();
    return {data, {data, &arena::release}};
  }
  torch_abi::Deleter raw_deleter() const override { return &arena::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

constexpr uint8_t ABOVE_TORCHS_OWN = 1;

template <class F>
F c10_function(const char* name) {
  return reinterpret_cast<F>(loaded_symbol("libc10.so", name));
}

// True when the virtual functions of c10::Allocator are torch_abi::Allocator's: as many, the pure ones and
// is_simple_data_ptr at the same positions.
bool has_known_functions() {
  using namespace torch_abi;
  constexpr size_t HEADER = 2;  // words of a vtable before the functions
  void** table = c10_function<void**>("_ZTVN3c109AllocatorE");
  Dl_info library;
  ElfW(Sym)* symbol = nullptr;
  if (!table || !dladdr1(table, &library, reinterpret_cast<void**>(&symbol), RTLD_DL_SYMENT) ||
      !symbol || symbol->st_size != (HEADER + SLOTS) * sizeof(void*))
    return false;
  table += HEADER;
  return table[IS_SIMPLE_DATA_PTR] ==
             c10_function<void*>("_ZNK3c109Allocator18is_simple_data_ptrERKNS_7DataPtrE") &&
         table[ALLOCATE] == table[COPY_DATA] && table[ALLOCATE] != table[RAW_DELETER];
}

// A return value with room behind torch's DataPtr, returned in memory like it.
struct Returned {
  static constexpr unsigned char UNTOUCHED = 0xa5;
  unsigned char bytes[sizeof(torch_abi::DataPtr) + 64];
  ~Returned() {}
};

// True when an allocator of torch returns the fields of torch_abi::DataPtr and writes nothing behind them.
bool returns_known_pointers(torch_abi::Allocator* allocator) {
  using Allocate = Returned (*)(torch_abi::Allocator*, size_t);
  alignas(torch_abi::DataPtr) unsigned char memory[sizeof(Returned)];
  std::memset(memory, Returned::UNTOUCHED, sizeof memory);
  __asm__ volatile("" ::"r"(memory) : "memory");  // the call below overwrites a part alone
  void** table = *reinterpret_cast<void***>(allocator);
  new (memory) Returned(reinterpret_cast<Allocate>(table[torch_abi::ALLOCATE])(allocator, 64));
  __asm__ volatile("" ::"r"(memory) : "memory");
  auto* pointer = reinterpret_cast<torch_abi::DataPtr*>(memory);
  for (size_t i = sizeof *pointer; i < sizeof memory; ++i)
    if (memory[i] != Returned::UNTOUCHED) return false;
  const bool known = pointer->data && pointer->data == pointer->context.get() &&
                     pointer->context.get_deleter() == allocator->raw_deleter() &&
                     pointer->device_type == 0 && pointer->device_index == -1;
  if (known) pointer->context.reset();
  return known;
}

std::string use_arena(size_t bytes) {
  static bool used = false;
  if (used) return "";
  auto set_allocator = c10_function<void (*)(torch_abi::Allocator*, uint8_t)>(
      "_ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh");
  auto get_allocator = c10_function<torch_abi::Allocator* (*)()>("_ZN3c1015GetCPUAllocatorEv");
  if (!set_allocator || !get_allocator || !has_known_functions() ||
      !returns_known_pointers(get_allocator()))
    return "this torch has another c10::Allocator than 2.9 to 2.15";
  if (!arena::reserve(bytes))
    return "the system refused the address space of the tensor arena (see ulimit -v)";
  set_allocator(new ArenaAllocator,
                ABOVE_TORCHS_OWN);  // torch keeps it for the life of the process
  used = true;
  return "";
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
             "addresses are reserved at the first call. Returns the reason when it cannot, else an "
             "empty string.");
  module.def("arena_stats", &arena_stats,
             "Bytes: reserved (addresses), touched (ever handed out), in_use, peak (of in_use); "
             "fallbacks: large blocks "
             "left to malloc.");
}

}  // namespace fm
