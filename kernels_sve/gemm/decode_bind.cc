// Python functions of decode.h.
#include "extension/arguments.h"

namespace fm {
namespace {

Call linear_few_rows(py::handle x_object, py::handle weight_object, py::handle out_object,
                     py::handle bias_object, const std::optional<std::string>& activation,
                     py::handle scales_object) {
  TensorView x("x", x_object), weight("weight", weight_object), out("out", out_object);
  weight.rank(2).last_contiguous();
  x.rank(2).floating().shape({-1, weight.size(1)}).last_contiguous();
  const Q8Scales scales = q8_scales(scales_object, weight, x, out);
  out.shape({x.size(0), weight.size(0)}).same_dtype(x).contiguous().disjoint({&x, &weight});
  const auto bias = optional_view("bias", bias_object);
  if (bias) {
    bias->same_dtype(x).shape({weight.size(0)}).contiguous();
    out.disjoint({&*bias});
  }
  const FewRowsArgs args = {x.size(0),     weight.size(0),   weight.size(1),
                            x.dtype(),     x.data(),         x.stride(0),
                            weight.data(), weight.stride(0), bias ? bias->data() : nullptr,
                            out.data(),    weight.size(0),   mlp_activation(activation),
                            scales};
  return [args] { kernels().linear_few_rows(args); };
}

const char LINEAR_FEW_ROWS_DOC[] =
    R"(out (M, N) = f(x (M, K) weight (N, K)^T + bias (N)), for a few rows M.

activation: f as in activate, or None. One dtype, float32, bfloat16 or float16; sums are float32. Rows of x and weight may be strided; bias may be None. The bits of a row
do not depend on the others. scales: of an int8 weight (quantize_q8). linear_forward is faster for more than a few rows.)";

}  // namespace

FM_BIND(decode) {
  using namespace py::literals;
  def_repeatable(module, "linear_few_rows", &linear_few_rows, "x"_a, "weight"_a, "out"_a,
                 "bias"_a = py::none(), "activation"_a = py::none(), "scales"_a = py::none(),
                 LINEAR_FEW_ROWS_DOC);
}

}  // namespace fm
