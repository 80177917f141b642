// c10::Allocator and c10::DataPtr as torch's binaries hold them (c10/core/Allocator.h of torch 2.9 to 2.15), so that one
// library fits every torch and needs none to be built. tests/host/test_allocator.py compares them with torch's headers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

namespace fm::torch_abi {

using Deleter = void (*)(void*);

struct DataPtr {
  void* data;
  std::unique_ptr<void, Deleter> context;
  int8_t device_type = 0;    // CPU
  int8_t device_index = -1;  // the only one
};

// The order of the virtual functions is the order of torch's.
class Allocator {
 public:
  virtual ~Allocator() = default;
  virtual DataPtr allocate(size_t bytes) = 0;
  virtual bool is_simple_data_ptr(const DataPtr& pointer) const {
    return pointer.data == pointer.context.get();
  }
  virtual Deleter raw_deleter() const = 0;
  virtual void copy_data(void* to, const void* from, size_t bytes) const = 0;
};

// Positions in the table of virtual functions, after the two destructors.
enum Slot { ALLOCATE = 2, IS_SIMPLE_DATA_PTR, RAW_DELETER, COPY_DATA, SLOTS };

}  // namespace fm::torch_abi
