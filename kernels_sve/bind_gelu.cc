// Python function of gelu.h.
#include "bind_shared.h"

namespace fm {
namespace {

void gelu_with_bias(py::handle x_object, py::handle bias_object, py::handle y_object) {
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
  unlocked(
      [&] {
        kernels().gelu(x.data(), strided ? x.stride(0) : x.size(-1), bias ? bias->data() : nullptr, y.data(), x.dtype(),
                       rows_of(x), x.size(-1));
      });
}

const char GELU_DOC[] = R"(y = gelu(x + bias) in the tanh approximation.

x, y: (..., h) float32, bfloat16 or float16, contiguous, but for the rows of x (rows, h), which may be strided; y may be x where
they are not. bias: (h) in x's dtype, or None.)";

}  // namespace

FM_BIND(gelu) {
  using namespace py::literals;
  module.def("gelu", &gelu_with_bias, "x"_a, "bias"_a, "y"_a, GELU_DOC);
}

}  // namespace fm
