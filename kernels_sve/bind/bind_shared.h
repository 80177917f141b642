// What the bindings of kernels on rows and of optional tensors share.
#pragma once
#include <optional>
#include <utility>

#include <pybind11/stl.h>

#include "bind/calls.h"

namespace fm {

// Product of all dimensions but the last; 0 without columns.
inline int64_t rows_of(const TensorView& x) { return x.size(-1) ? x.numel() / x.size(-1) : 0; }

inline std::optional<TensorView> optional_view(const char* name, py::handle object) {
  if (object.is_none()) return std::nullopt;
  return TensorView(name, object);
}

// The activation of this name, one of `allowed`.
inline Activation activation_of(const std::string& name,
                                std::initializer_list<std::pair<const char*, Activation>> allowed) {
  std::string names;
  for (const auto& [known, activation] : allowed) {
    if (name == known) return activation;
    names += (names.empty() ? "" : ", ") + std::string(known);
  }
  throw py::value_error("activation: expected one of " + names + ", got " + name);
}

// That of an MLP without a gate; without a name none.
inline Activation mlp_activation(const std::optional<std::string>& name) {
  if (!name) return Activation::none;
  return activation_of(*name, {{"gelu", Activation::gelu},
                               {"gelu_exact", Activation::gelu_exact},
                               {"squared_relu", Activation::squared_relu}});
}

}  // namespace fm
