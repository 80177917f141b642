// What the bindings of kernels on rows and of optional tensors share.
#pragma once
#include <optional>

#include <pybind11/stl.h>

#include "calls.h"

namespace fm {

// Product of all dimensions but the last; 0 without columns.
inline int64_t rows_of(const TensorView& x) { return x.size(-1) ? x.numel() / x.size(-1) : 0; }

inline std::optional<TensorView> optional_view(const char* name, py::handle object) {
  if (object.is_none()) return std::nullopt;
  return TensorView(name, object);
}

}  // namespace fm
