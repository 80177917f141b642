// Python function of activation.h.
#include "extension/arguments.h"

namespace fm {
namespace {

void activate(py::handle x_object, py::handle bias_object, py::handle y_object,
              const std::string& activation) {
  TensorView x("x", x_object), y("y", y_object);
  const auto bias = optional_view("bias", bias_object);
  x.floating().rank(1, 8);
  const bool strided = x.rank() == 2 && x.size(0) > 1;
  strided ? x.last_contiguous() : x.contiguous();
  y.same_dtype(x).same_shape(x).contiguous().same_or_disjoint({&x});
  if (bias) {
    bias->same_dtype(x).shape({x.size(-1)}).contiguous();
    y.disjoint({&*bias});
  }
  const ActivationArgs args = {x.data(),   bias ? bias->data() : nullptr,
                               y.data(),   strided ? x.stride(0) : x.size(-1),
                               rows_of(x), x.size(-1),
                               x.dtype(),  mlp_activation(activation)};
  unlocked([&] { kernels().activate(args); });
}

const char ACTIVATE_DOC[] =
    R"(y = f(x + bias). activation: f, "gelu" (its tanh form), "gelu_exact" or "squared_relu".

x, y: (..., h) float32, bfloat16 or float16, contiguous, but for the rows of x (rows, h), which may be strided; y may be x where
they are not. bias: (h) in x's dtype, or None.)";

}  // namespace

FM_BIND(activation) {
  using namespace py::literals;
  module.def("activate", &activate, "x"_a, "bias"_a, "y"_a, "activation"_a = "gelu", ACTIVATE_DOC);
}

}  // namespace fm
