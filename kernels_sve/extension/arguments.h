// What the bindings of kernels on rows and of optional tensors share.
#pragma once
#include <optional>
#include <utility>

#include <pybind11/stl.h>

#include "extension/calls.h"

namespace fm {

// Product of all dimensions but the last; 0 without columns.
inline int64_t rows_of(const TensorView& x) { return x.size(-1) ? x.numel() / x.size(-1) : 0; }

inline std::optional<TensorView> optional_view(const char* name, py::handle object) {
  if (object.is_none()) return std::nullopt;
  return TensorView(name, object);
}

// starts (b, s), each its own position or the start before it; null for None.
inline const int32_t* document_starts(py::handle object, int64_t b, int64_t s) {
  const auto starts = optional_view("starts", object);
  if (!starts) return nullptr;
  starts->dtype({DType::i32}).shape({b, s}).contiguous().aligned(4);
  const int32_t* values = starts->data<int32_t>();
  for (int64_t i = 0; i < b * s; ++i) {
    const int64_t position = i % s, before = position ? values[i - 1] : 0;
    if (values[i] == before || values[i] == position) continue;
    starts->fail("where the document of position " + std::to_string(position) + " begins, " +
                     std::to_string(before) + " or " + std::to_string(position) +
                     " (a sliding start is the argument window)",
                 std::to_string(values[i]));
  }
  return values;
}

// A writable row must not lie on another: the stride is at least the row's length.
inline void distinct_rows(const TensorView& t) {
  if (t.numel() && t.size(0) > 1 && t.stride(0) < t.size(1)) {
    t.fail("rows apart from each other", "row stride " + std::to_string(t.stride(0)));
  }
}

// The scales of a weight (..., N, K), which is int8 with scales and x's type without; null without.
inline Q8Scales q8_scales(py::handle scales_object, const TensorView& weight, const TensorView& x,
                          const TensorView& out) {
  if (scales_object.is_none()) {
    x.same_dtype(weight.floating());
    return {};
  }
  weight.dtype({DType::i8});
  const TensorView scales("scales", scales_object);
  scales.dtype({DType::bf16}).rank(weight.rank()).last_contiguous();
  const int64_t rows = weight.size(-2), blocks = q8_blocks(weight.size(-1));
  weight.rank() == 3 ? scales.shape({weight.size(0), rows, blocks}).contiguous()
                     : scales.shape({rows, blocks});
  out.disjoint({&scales});
  return {scales.data<bf16>(), scales.stride(-2)};
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
