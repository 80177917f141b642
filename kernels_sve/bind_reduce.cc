// Python functions of reduce.h: squared_norm, count_zeros.
#include "tensor_view.h"

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
      "Sum of squares of a contiguous float32, bfloat16 or float16 tensor; the same bits for any number of threads.");
  module.def(
      "count_zeros",
      [](py::handle object) {
        TensorView x("x", object);
        x.floating().contiguous();
        return unlocked([&] { return kernels().count_zeros(x.data(), x.dtype(), x.numel()); });
      },
      "x"_a, "Number of elements equal to zero.");
}

}  // namespace fm
