// A torch tensor as C++ sees it, read through Python attributes (no torch headers, so the extension cross-compiles and
// fits any torch), and the checks a binding makes before a byte is written. Every failed check is a ValueError:
// "<argument>: expected <what>, got <what>".
//
//   TensorView x("x", x_object), out("out", out_object);
//   x.rank(2).dtype({DType::f32, DType::bf16}).contiguous();
//   out.same_shape(x).same_dtype(x).contiguous().disjoint({&x});
#pragma once
#include <pybind11/pybind11.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "dispatch.h"
#include "parallel.h"

namespace fm {
namespace py = pybind11;

class TensorView {
 public:
  TensorView(const char* name, py::handle tensor);

  const TensorView& dtype(std::initializer_list<DType> allowed) const;
  const TensorView& floating() const { return dtype({DType::f32, DType::bf16, DType::f16}); }
  const TensorView& same_dtype(const TensorView& other) const;
  const TensorView& rank(int exact) const { return rank(exact, exact); }
  const TensorView& rank(int min, int max) const;
  // -1 stands for any size.
  const TensorView& shape(std::initializer_list<int64_t> expected) const;
  const TensorView& same_shape(const TensorView& other) const;
  const TensorView& contiguous() const;
  // Elements of the last dimension lie side by side; the other strides are free.
  const TensorView& last_contiguous() const;
  const TensorView& aligned(int64_t bytes) const;
  // No byte shared with any of these. Compares whole address ranges, so interleaved views of one buffer count as
  // overlapping.
  const TensorView& disjoint(std::initializer_list<const TensorView*> others) const;
  // Disjoint, or exactly the same memory: what an elementwise kernel may do in place.
  const TensorView& same_or_disjoint(std::initializer_list<const TensorView*> others) const;

  int rank() const { return static_cast<int>(sizes_.size()); }
  int64_t numel() const { return numel_; }
  int64_t size(int dim) const { return sizes_[dim < 0 ? dim + rank() : dim]; }
  int64_t stride(int dim) const { return strides_[dim < 0 ? dim + rank() : dim]; }  // in elements
  DType dtype() const { return dtype_; }
  const char* name() const { return name_; }
  template <class T = void>
  T* data() const {
    return reinterpret_cast<T*>(address_);
  }

  // Throws the ValueError.
  [[noreturn]] void fail(const std::string& expected, const std::string& got) const;

 private:
  bool overlaps(const TensorView& other) const;
  std::string shape_text() const;

  const char* name_;
  uintptr_t address_;
  uintptr_t bytes_;  // from the first to the end of the last element
  int64_t numel_;
  DType dtype_;
  std::vector<int64_t> sizes_, strides_;
};

const char* dtype_name(DType dtype);

// Runs a kernel without the interpreter lock.
template <class F>
auto unlocked(F&& f) {
  py::gil_scoped_release release;
  return f();
}

// Raises Python's ValueError unless `good`: for arguments that are no tensors.
inline void require(bool good, const char* name, const std::string& expected,
                    const std::string& got) {
  if (!good) throw py::value_error(std::string(name) + ": expected " + expected + ", got " + got);
}

// FM_BIND(family) { module.def(...); } in <family>_bind.cc adds that family's functions to the extension.
using BindFunction = void (*)(py::module_&);
std::vector<BindFunction>& bind_functions();

#define FM_BIND(family)                                                                       \
  static void bind_##family(py::module_& module);                                             \
  static const bool registered_##family = (bind_functions().push_back(&bind_##family), true); \
  static void bind_##family([[maybe_unused]] py::module_& module)

}  // namespace fm
