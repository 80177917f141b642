// Python functions of q8.h.
#include "extension/arguments.h"

namespace fm {
namespace {

Q8Args q8_args(const TensorView& weight, const TensorView& values, const TensorView& scales) {
  weight.rank(2).floating().last_contiguous();
  values.dtype({DType::i8}).same_shape(weight).contiguous();
  scales.dtype({DType::bf16}).shape({weight.size(0), q8_blocks(weight.size(1))}).contiguous();
  return {weight.size(0),   weight.size(1),        weight.dtype(),     weight.data(),
          weight.stride(0), values.data<int8_t>(), scales.data<bf16>()};
}

void quantize_q8(py::handle weight_object, py::handle values_object, py::handle scales_object) {
  const TensorView weight("weight", weight_object), values("values", values_object),
      scales("scales", scales_object);
  const Q8Args args = q8_args(weight, values, scales);
  values.disjoint({&weight, &scales});
  scales.disjoint({&weight});
  unlocked([&] { kernels().quantize_q8(args); });
}

void dequantize_q8(py::handle values_object, py::handle scales_object, py::handle out_object) {
  const TensorView values("values", values_object), scales("scales", scales_object),
      out("out", out_object);
  const Q8Args args = q8_args(out, values, scales);
  out.disjoint({&values, &scales});
  distinct_rows(out);
  unlocked([&] { kernels().dequantize_q8(args); });
}

}  // namespace

FM_BIND(q8) {
  using namespace py::literals;
  module.def("quantize_q8", &quantize_q8, "weight"_a, "values"_a, "scales"_a,
             "values (N, K) int8 and scales (N, ceil(K / 64)) bfloat16 of weight (N, K), which is "
             "about values * scales: each 64\n"
             "neighbouring numbers of a row share a scale, the largest magnitude / 127 rounded up. "
             "A block with a NaN or an\n"
             "infinity has the scale NaN. weight has a floating dtype; its rows may be strided.");
  module.def("dequantize_q8", &dequantize_q8, "values"_a, "scales"_a, "out"_a,
             "out (N, K), of a floating dtype, = values * scales of quantize_q8. Exact in "
             "float32.");
}

}  // namespace fm
