// Python functions of reduce.h: squared_norm, count_zeros, sum_rows.
#include "extension/tensor_view.h"

namespace fm {

FM_BIND(reduce) {
  using namespace py::literals;
  module.def(
      "squared_norm",
      [](py::handle object) {
        TensorView x("x", object);
        x.floating().contiguous();
        return unlocked([&] { return kernels().squared_norm(x.data(), x.dtype(), x.numel()); });
      },
      "x"_a,
      "Sum of squares of a contiguous float32, bfloat16 or float16 tensor; the same bits for any "
      "number of threads.");
  module.def(
      "count_zeros",
      [](py::handle object) {
        TensorView x("x", object);
        x.floating().contiguous();
        return unlocked([&] { return kernels().count_zeros(x.data(), x.dtype(), x.numel()); });
      },
      "x"_a, "Number of elements equal to zero.");
  module.def(
      "sum_rows",
      [](py::handle x_object, py::handle out_object) {
        TensorView x("x", x_object), out("out", out_object);
        x.floating().rank(2).last_contiguous();
        require(x.size(0) > 0, "x", "at least one row", "none");
        out.floating().shape({x.size(1)}).contiguous();
        unlocked([&] {
          kernels().sum_rows(x.data(), x.dtype(), x.size(0), x.size(1), x.stride(0), out.data(),
                             out.dtype());
        });
      },
      "x"_a, "out"_a,
      "out (cols) = the sum of the rows of x (rows, cols), formed in float32 from the first row to "
      "the last and rounded once. "
      "Rows may lie apart; out may be one of them.");
}

}  // namespace fm
