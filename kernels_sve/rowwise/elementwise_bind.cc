// Python functions of elementwise.h: elementwise, convert.
#include <utility>

#include "extension/tensor_view.h"

namespace fm {
namespace {

constexpr std::pair<const char*, Function> FUNCTIONS[] = {{"exp", Function::exp},
                                                          {"log", Function::log},
                                                          {"sqrt", Function::sqrt},
                                                          {"rsqrt", Function::rsqrt},
                                                          {"reciprocal", Function::reciprocal}};

Function function_named(const std::string& name) {
  std::string known;
  for (const auto& [candidate, function] : FUNCTIONS) {
    if (name == candidate) return function;
    known += (known.empty() ? "" : ", ") + std::string(candidate);
  }
  throw py::value_error("function: expected one of " + known + ", got " + name);
}

void bind_function(const std::string& name, py::handle x_object, py::handle out_object) {
  const Function function = function_named(name);
  TensorView x("x", x_object), out("out", out_object);
  x.dtype({DType::f32}).contiguous();
  out.same_dtype(x).same_shape(x).contiguous().same_or_disjoint({&x});
  unlocked([&] { kernels().elementwise(function, x.data<float>(), out.data<float>(), x.numel()); });
}

void bind_convert(py::handle x_object, py::handle out_object) {
  TensorView x("x", x_object), out("out", out_object);
  x.floating().contiguous();
  out.floating().same_shape(x).contiguous().same_or_disjoint({&x});
  unlocked([&] { kernels().convert(x.data(), x.dtype(), out.data(), out.dtype(), x.numel()); });
}

}  // namespace

FM_BIND(elementwise) {
  using namespace py::literals;
  module.def("elementwise", &bind_function, "function"_a, "x"_a, "out"_a,
             "out = function(x) on contiguous float32: exp, log (of positive normal numbers), "
             "sqrt, rsqrt, reciprocal.");
  module.def(
      "convert", &bind_convert, "x"_a, "out"_a,
      "out = x in out's dtype, rounded to nearest even: float32, bfloat16, float16. Contiguous.");
}

}  // namespace fm
