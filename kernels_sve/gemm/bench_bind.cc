// Python functions of bench.h: bench_fma, bench_clock, bench_triad, bench_gemm_panel.
#include "extension/tensor_view.h"

namespace fm {

FM_BIND(bench) {
  using namespace py::literals;
  auto positive = [](int64_t steps) {
    if (steps < 1) throw py::value_error("steps: expected 1 or more, got " + std::to_string(steps));
  };
  module.def(
      "bench_fma",
      [positive](int64_t steps, bool int8) {
        positive(steps);
        return unlocked([&] { return kernels().bench_fma(steps, int8); });
      },
      "steps"_a, "int8"_a = false,
      "Runs `steps` rounds of independent multiply-adds in every thread, in float32 or, int8, as "
      "INT8 matmuls do them; "
      "returns the operations done, two for each.");
  module.def(
      "bench_clock",
      [positive](int64_t steps) {
        positive(steps);
        return unlocked([&] { return kernels().bench_clock(steps); });
      },
      "steps"_a, "Runs `steps` dependent integer additions, one per clock cycle of the core.");
  module.def(
      "bench_triad",
      [](py::handle out_object, py::handle x_object, py::handle y_object, float factor) {
        TensorView out("out", out_object), x("x", x_object), y("y", y_object);
        out.dtype({DType::f32}).contiguous().disjoint({&x, &y});
        for (const TensorView* t : {&x, &y}) t->same_dtype(out).same_shape(out).contiguous();
        unlocked([&] {
          kernels().bench_triad(out.data<float>(), x.data<float>(), y.data<float>(), factor,
                                out.numel());
        });
      },
      "out"_a, "x"_a, "y"_a, "factor"_a, "out = x + factor * y on contiguous float32 tensors.");
  module.def(
      "bench_gemm_panel",
      [positive](py::handle a_object, py::handle b_object, py::handle c_object, int64_t sweeps) {
        positive(sweeps);
        TensorView a("a", a_object), b("b", b_object), c("c", c_object);
        a.rank(2).dtype({DType::f32}).contiguous();
        b.rank(2).same_dtype(a).shape({a.size(1), -1}).contiguous();
        c.rank(2).same_dtype(a).shape({a.size(0), b.size(1)}).contiguous().disjoint({&a, &b});
        unlocked([&] {
          kernels().bench_gemm_panel(a.data<float>(), b.data<float>(), c.data<float>(), a.size(0),
                                     b.size(1), a.size(1), sweeps);
        });
      },
      "a"_a, "b"_a, "c"_a, "sweeps"_a,
      "c = sweeps * a @ b by the GEMM micro-kernel alone: packed once, then `sweeps` times added, "
      "on one thread.");
}

}  // namespace fm
