// Python functions of gate.h.
#include "extension/arguments.h"

namespace fm {
namespace {

// (rows, 2, cols) with columns side by side; its rows may lie in a wider tensor.
void check_parts(const TensorView& x) { x.floating().rank(3).shape({-1, 2, -1}).last_contiguous(); }

GateArgs gate_args(const TensorView& x, const std::string& activation) {
  check_parts(x);
  return {x.data(),
          x.stride(0),
          x.stride(1),
          x.size(0),
          x.size(2),
          x.dtype(),
          activation_of(activation, {{"silu", Activation::silu}, {"gelu", Activation::gelu}})};
}

Call gate_columns(py::handle x_object, py::handle y_object, const std::string& activation) {
  TensorView x("x", x_object), y("y", y_object);
  const GateArgs args = gate_args(x, activation);
  y.same_dtype(x).shape({x.size(0), x.size(2)}).contiguous().disjoint({&x});
  return [args, y = y.data()] { kernels().gate(args, y); };
}

void gate_columns_backward(py::handle dy_object, py::handle x_object, py::handle dx_object,
                           const std::string& activation) {
  TensorView dy("dy", dy_object), x("x", x_object), dx("dx", dx_object);
  const GateArgs args = gate_args(x, activation);
  dy.same_dtype(x).shape({x.size(0), x.size(2)}).contiguous();
  check_parts(dx);
  dx.same_dtype(x).same_shape(x).same_or_disjoint({&x}).disjoint({&dy});
  unlocked(
      [&] { kernels().gate_backward(args, {dy.data(), dx.data(), dx.stride(0), dx.stride(1)}); });
}

const float* check_factors(const TensorView& factors, const TensorView& x) {
  return factors.dtype({DType::f32}).shape({x.size(0)}).contiguous().data<float>();
}

void scaled_gate_columns(py::handle x_object, py::handle factors_object, py::handle y_object,
                         const std::string& activation) {
  TensorView x("x", x_object), factors("factors", factors_object), y("y", y_object);
  GateArgs args = gate_args(x, activation);
  args.factors = check_factors(factors, x);
  y.same_dtype(x).shape({x.size(0), x.size(2)}).contiguous().disjoint({&x, &factors});
  unlocked([&] { kernels().gate(args, y.data()); });
}

void scaled_gate_columns_backward(py::handle dy_object, py::handle x_object,
                                  py::handle factors_object, py::handle dx_object,
                                  py::handle dfactors_object, py::handle y_object,
                                  const std::string& activation) {
  TensorView dy("dy", dy_object), x("x", x_object), factors("factors", factors_object),
      dx("dx", dx_object), dfactors("dfactors", dfactors_object), y("y", y_object);
  GateArgs args = gate_args(x, activation);
  args.factors = check_factors(factors, x);
  check_factors(dfactors, x);
  dfactors.disjoint({&dy, &x, &factors, &dx, &y});
  dy.same_dtype(x).shape({x.size(0), x.size(2)}).contiguous();
  check_parts(dx);
  dx.same_dtype(x).same_shape(x).same_or_disjoint({&x}).disjoint({&dy, &factors});
  y.same_dtype(x).same_shape(dy).contiguous().same_or_disjoint({&dy}).disjoint({&x, &factors, &dx});
  unlocked([&] {
    kernels().gate_backward(
        args, {dy.data(), dx.data(), dx.stride(0), dx.stride(1), dfactors.data<float>(), y.data()});
  });
}

const char GATE_DOC[] =
    R"(y = f(x[:, 0]) x[:, 1]. activation: f, "silu" (g / (1 + exp(-g))) or "gelu" (its tanh form).

x: (rows, 2, cols) float32, bfloat16 or float16, the columns of a part side by side. y: (rows, cols), contiguous.)";

const char GATE_BACKWARD_DOC[] = R"(dx = gradient of gate for the gradient dy of its result.

dy: (rows, cols), contiguous. x, dx: (rows, 2, cols), the columns of a part side by side; dx may be x.)";

const char SCALED_GATE_BACKWARD_DOC[] =
    R"(dx and dfactors = gradients of scaled_gate for the gradient dy of its result y, which is made again.

dy, y: (rows, cols), contiguous; y may be dy. x, dx: (rows, 2, cols), the columns of a part side by side; dx may be x. factors,
dfactors: (rows) float32.)";

}  // namespace

FM_BIND(gate) {
  using namespace py::literals;
  def_repeatable(module, "gate", &gate_columns, "x"_a, "y"_a, "activation"_a = "silu", GATE_DOC);
  module.def("gate_backward", &gate_columns_backward, "dy"_a, "x"_a, "dx"_a,
             "activation"_a = "silu", GATE_BACKWARD_DOC);
  module.def("scaled_gate", &scaled_gate_columns, "x"_a, "factors"_a, "y"_a,
             "activation"_a = "silu",
             "gate with each row of y times its factor, (rows) float32; rounded once.");
  module.def("scaled_gate_backward", &scaled_gate_columns_backward, "dy"_a, "x"_a, "factors"_a,
             "dx"_a, "dfactors"_a, "y"_a, "activation"_a = "silu", SCALED_GATE_BACKWARD_DOC);
}

}  // namespace fm
