// Python function of activation.h.
#include "extension/arguments.h"

namespace fm {
namespace {

// The activation of x (..., h), into y; bias may be none.
ActivationArgs activation_args(const TensorView& x, const TensorView* bias, const TensorView& y,
                               const std::string& activation) {
  x.floating().rank(1, 8);
  const bool strided = x.rank() == 2 && x.size(0) > 1;
  strided ? x.last_contiguous() : x.contiguous();
  y.same_dtype(x).same_shape(x).contiguous().same_or_disjoint({&x});
  if (bias) {
    bias->same_dtype(x).shape({x.size(-1)}).contiguous();
    y.disjoint({bias});
  }
  return {x.data(),
          bias ? bias->data() : nullptr,
          y.data(),
          strided ? x.stride(0) : x.size(-1),
          rows_of(x),
          x.size(-1),
          x.dtype(),
          activation_of(activation, {{"gelu", Activation::gelu},
                                     {"gelu_exact", Activation::gelu_exact},
                                     {"squared_relu", Activation::squared_relu},
                                     {"silu", Activation::silu}})};
}

void activate(py::handle x_object, py::handle bias_object, py::handle y_object,
              const std::string& activation) {
  const TensorView x("x", x_object), y("y", y_object);
  const auto bias = optional_view("bias", bias_object);
  const ActivationArgs args = activation_args(x, bias ? &*bias : nullptr, y, activation);
  unlocked([&] { kernels().activate(args); });
}

void activate_backward(py::handle dy_object, py::handle x_object, py::handle dx_object,
                       const std::string& activation) {
  const TensorView dy("dy", dy_object), x("x", x_object), dx("dx", dx_object);
  const ActivationArgs args = activation_args(x, nullptr, dx, activation);
  dy.same_dtype(x).same_shape(x).contiguous();
  dx.same_or_disjoint({&dy});
  unlocked([&] { kernels().activate_backward(args, dy.data()); });
}

const char ACTIVATE_DOC[] =
    R"(y = f(x + bias). activation: f, "gelu" (its tanh form), "gelu_exact", "squared_relu" or "silu".

x, y: (..., h) float32, bfloat16 or float16, contiguous, but for the rows of x (rows, h), which may be strided; y may be x where
they are not. bias: (h) in x's dtype, or None.)";

const char ACTIVATE_BACKWARD_DOC[] =
    R"(dx = dy f'(x), of the same activations.

dy, x, dx: (..., h) of one dtype, contiguous, but for the rows of x (rows, h), which may be strided; dx may be dy or x.)";

}  // namespace

FM_BIND(activation) {
  using namespace py::literals;
  module.def("activate", &activate, "x"_a, "bias"_a, "y"_a, "activation"_a = "gelu", ACTIVATE_DOC);
  module.def("activate_backward", &activate_backward, "dy"_a, "x"_a, "dx"_a,
             "activation"_a = "gelu", ACTIVATE_BACKWARD_DOC);
}

}  // namespace fm
