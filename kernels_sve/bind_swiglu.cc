// Python functions of swiglu.h.
#include "bind_shared.h"

namespace fm {
namespace {

// (rows, 2, cols) with columns side by side; its rows may lie in a wider tensor.
void check_parts(const TensorView& x) { x.floating().rank(3).shape({-1, 2, -1}).last_contiguous(); }

SwiGLUArgs swiglu_args(const TensorView& x) {
  check_parts(x);
  return {x.data(), x.stride(0), x.stride(1), x.size(0), x.size(2), x.dtype()};
}

Call gate_columns(py::handle x_object, py::handle y_object) {
  TensorView x("x", x_object), y("y", y_object);
  const SwiGLUArgs args = swiglu_args(x);
  y.same_dtype(x).shape({x.size(0), x.size(2)}).contiguous().disjoint({&x});
  return [args, y = y.data()] { kernels().swiglu(args, y); };
}

void gate_columns_backward(py::handle dy_object, py::handle x_object, py::handle dx_object) {
  TensorView dy("dy", dy_object), x("x", x_object), dx("dx", dx_object);
  const SwiGLUArgs args = swiglu_args(x);
  dy.same_dtype(x).shape({x.size(0), x.size(2)}).contiguous();
  check_parts(dx);
  dx.same_dtype(x).same_shape(x).same_or_disjoint({&x}).disjoint({&dy});
  unlocked([&] { kernels().swiglu_backward(args, {dy.data(), dx.data(), dx.stride(0), dx.stride(1)}); });
}

const char SWIGLU_DOC[] = R"(y = silu(x[:, 0]) x[:, 1], silu(g) = g / (1 + exp(-g)).

x: (rows, 2, cols) float32, bfloat16 or float16, the columns of a part side by side. y: (rows, cols), contiguous.)";

const char SWIGLU_BACKWARD_DOC[] = R"(dx = gradient of swiglu for the gradient dy of its result.

dy: (rows, cols), contiguous. x, dx: (rows, 2, cols), the columns of a part side by side; dx may be x.)";

}  // namespace

FM_BIND(swiglu) {
  using namespace py::literals;
  def_repeatable(module, "swiglu", &gate_columns, "x"_a, "y"_a, SWIGLU_DOC);
  module.def("swiglu_backward", &gate_columns_backward, "dy"_a, "x"_a, "dx"_a, SWIGLU_BACKWARD_DOC);
}

}  // namespace fm
