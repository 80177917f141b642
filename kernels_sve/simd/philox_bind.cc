// Python functions of philox.h: philox4x32, philox_normal, dropout.
#include "extension/tensor_view.h"

namespace fm {
namespace {

void bind_philox4x32(py::handle counter_object, py::handle out_object, uint32_t key0,
                     uint32_t key1) {
  TensorView counter("counter", counter_object), out("out", out_object);
  counter.dtype({DType::i32}).shape({-1, 4}).contiguous();
  out.dtype({DType::i32}).same_shape(counter).contiguous().same_or_disjoint({&counter});
  unlocked([&] {
    kernels().philox4x32(counter.data<uint32_t>(), out.data<uint32_t>(), counter.size(0), key0,
                         key1);
  });
}

void bind_normal(py::handle out_object, uint64_t seed, uint64_t stream, int64_t row0, int64_t col0,
                 int64_t full_cols, double std, double mean) {
  TensorView out("out", out_object);
  out.dtype({DType::f32}).rank(2).contiguous();
  require(row0 >= 0, "row0", "0 or more", std::to_string(row0));
  require(col0 >= 0 && col0 + out.size(1) <= full_cols, "col0",
          "a slice within the " + std::to_string(full_cols) + " columns (full_cols) of the whole",
          "columns " + std::to_string(col0) + " to " + std::to_string(col0 + out.size(1)));
  require(row0 + out.size(0) <= INT64_C(1) << 32, "row0", "fewer than 2**32 rows",
          std::to_string(row0 + out.size(0)));
  require(std >= 0, "std", "0 or more", std::to_string(std));
  const NormalArgs args{out.size(0),
                        out.size(1),
                        row0,
                        col0,
                        seed,
                        stream,
                        static_cast<float>(std),
                        static_cast<float>(mean)};
  unlocked([&] { kernels().philox_normal(out.data<float>(), args); });
}

void bind_dropout(py::handle x_object, py::handle out_object, double p, uint64_t seed,
                  uint64_t stream, int64_t first_sample, int sample_dim, int64_t row0,
                  int64_t col0) {
  TensorView x("x", x_object), out("out", out_object);
  x.floating().rank(2, 8).contiguous();
  out.same_dtype(x).same_shape(x).contiguous().same_or_disjoint({&x});
  require(p >= 0 && p < 1, "p", "a probability in [0, 1)", std::to_string(p));
  require(sample_dim >= 0 && sample_dim < x.rank() - 1, "sample_dim", "a dimension before the last",
          std::to_string(sample_dim));
  require(first_sample >= 0, "first_sample", "0 or more", std::to_string(first_sample));
  require(row0 >= 0, "row0", "0 or more", std::to_string(row0));
  require(col0 >= 0, "col0", "0 or more", std::to_string(col0));
  DropoutArgs args{1,          x.size(sample_dim),    1,
                   x.size(-1), static_cast<float>(p), {seed, stream, first_sample, row0, col0}};
  for (int d = 0; d < x.rank() - 1; ++d) {
    if (d != sample_dim) (d < sample_dim ? args.outer : args.inner) *= x.size(d);
  }
  require(row0 + args.outer * args.inner <= INT64_C(1) << 32, "row0",
          "fewer than 2**32 rows in a sample", std::to_string(row0 + args.outer * args.inner));
  if (x.numel()) unlocked([&] { kernels().dropout(x.data(), out.data(), x.dtype(), args); });
}

const char NORMAL_DOC[] = R"(Fills out with normal numbers.

out: float32 (rows, cols), contiguous: the slice at (row0, col0) of a global matrix of full_cols columns. Each number is
a function of seed, stream and the element's row and column in the global matrix alone.)";

const char DROPOUT_DOC[] =
    R"(out = x / (1 - p) where kept, else 0. Its own backward: call it on the gradient with the same numbers.

x: float32, bfloat16 or float16, contiguous; out may be x. Dimension sample_dim counts samples from first_sample, the
last dimension columns from col0, and all the others together, in order, rows from row0: positions in the sample's
global tensor, which with seed and stream decide the mask.
  hidden activations (s, b, h local):       sample_dim=1, row0=first position, col0=first column of the slice
  attention scores (b, heads local, s, s):  sample_dim=0, row0=first head * s)";

}  // namespace

FM_BIND(philox) {
  using namespace py::literals;
  module.def("philox4x32", &bind_philox4x32, "counter"_a, "out"_a, "key0"_a, "key1"_a,
             "Philox4x32-10 itself: counter and out are int32 (calls, 4), read as unsigned.");
  module.def("philox_normal", &bind_normal, "out"_a, "seed"_a, "stream"_a, "row0"_a, "col0"_a,
             "full_cols"_a, "std"_a, "mean"_a = 0.0, NORMAL_DOC);
  module.def("dropout", &bind_dropout, "x"_a, "out"_a, "p"_a, "seed"_a, "stream"_a,
             "first_sample"_a, "sample_dim"_a = 1, "row0"_a = 0, "col0"_a = 0, DROPOUT_DOC);
}

}  // namespace fm
