// Python function of adamw.h.
#include <cmath>

#include "simd/philox_layout.h"
#include "extension/tensor_view.h"

namespace fm {
namespace {

AdamWArgs adamw_args(double lr, double beta1, double beta2, double eps, double weight_decay,
                     int64_t step, double grad_scale) {
  auto beta_check = [](const char* name, double beta) {
    if (!(beta >= 0 && beta < 1))
      throw py::value_error(std::string(name) + ": expected a number in [0, 1), got " +
                            std::to_string(beta));
  };
  beta_check("beta1", beta1);
  beta_check("beta2", beta2);
  if (!(eps > 0)) throw py::value_error("eps: expected more than 0, got " + std::to_string(eps));
  if (step < 1) throw py::value_error("step: expected 1 or more, got " + std::to_string(step));
  const double correction1 = 1 - std::pow(beta1, step), correction2 = 1 - std::pow(beta2, step);
  return {float(grad_scale),
          float(1 - lr * weight_decay),
          float(1 - beta1),
          float(beta2),
          float(1 - beta2),
          float(lr / correction1),
          float(1 / std::sqrt(correction2)),
          float(eps),
          {}};
}

// The words of a step have a key of their own. columns 0: the elements' numbers follow one another from offset + first on.
RoundingArgs rounding_args(uint64_t seed, uint32_t stream, int64_t step, int64_t offset,
                           int64_t first, int64_t columns, int64_t row) {
  const auto check = [](const char* name, int64_t number) {
    require(number >= 0, name, "0 or more", std::to_string(number));
  };
  check("offset", offset), check("first", first), check("columns", columns), check("row", row);
  const PhiloxKey key = philox_key(seed, stream + (static_cast<uint64_t>(step) << 32));
  RoundingArgs args{key.k0, key.k1, offset, first};
  if (columns) args.columns = columns, args.row = row;
  return args;
}

void bind_step(py::handle param_object, py::handle grad_object, py::handle exp_avg_object,
               py::handle exp_avg_sq_object, double lr, double beta1, double beta2, double eps,
               double weight_decay, int64_t step, double grad_scale, py::object copy_object,
               uint64_t seed, uint32_t stream, int64_t offset, int64_t first, int64_t columns,
               int64_t row) {
  TensorView param("param", param_object), grad("grad", grad_object),
      exp_avg("exp_avg", exp_avg_object), exp_avg_sq("exp_avg_sq", exp_avg_sq_object);
  param.dtype({DType::f32}).contiguous();
  grad.dtype({DType::f32});
  for (const TensorView* t : {&exp_avg, &exp_avg_sq}) t->dtype({DType::f32, DType::bf16});
  for (const TensorView* t : {&grad, &exp_avg, &exp_avg_sq})
    t->same_shape(param).contiguous().disjoint({&param});
  exp_avg.disjoint({&grad, &exp_avg_sq});
  exp_avg_sq.disjoint({&grad});
  AdamWArgs args = adamw_args(lr, beta1, beta2, eps, weight_decay, step, grad_scale);
  args.rounding = rounding_args(seed, stream, step, offset, first, columns, row);
  void* copy = nullptr;
  DType copy_dtype = DType::f32;
  if (!copy_object.is_none()) {
    TensorView view("copy", copy_object);
    view.floating().same_shape(param).contiguous().disjoint({&param, &grad, &exp_avg, &exp_avg_sq});
    copy = view.data();
    copy_dtype = view.dtype();
  }
  unlocked([&] {
    kernels().adamw(param.data<float>(), grad.data<float>(), {exp_avg.data(), exp_avg.dtype()},
                    {exp_avg_sq.data(), exp_avg_sq.dtype()}, copy, copy_dtype, param.numel(), args);
  });
}

}  // namespace

FM_BIND(adamw) {
  using namespace py::literals;
  module.def("adamw", &bind_step, "param"_a, "grad"_a, "exp_avg"_a, "exp_avg_sq"_a, "lr"_a,
             "beta1"_a, "beta2"_a, "eps"_a, "weight_decay"_a, "step"_a, "grad_scale"_a = 1.0,
             "copy"_a = py::none(), "seed"_a = 0, "stream"_a = 0, "offset"_a = 0, "first"_a = 0,
             "columns"_a = 0, "row"_a = 0,
             "One step of torch.optim.AdamW on contiguous tensors, in place; step counts from 1. "
             "param and grad are "
             "float32, exp_avg and\n"
             "exp_avg_sq float32 or bfloat16. grad is multiplied by grad_scale and left as it is. "
             "copy: a float32, "
             "bfloat16 or float16 tensor\n"
             "that receives the new parameters. A bfloat16 exp_avg is rounded to nearest even, a "
             "bfloat16 exp_avg_sq up "
             "or down with the\n"
             "probability that keeps its mean, by words that depend on seed, stream, step and the "
             "element: element i is "
             "number\n"
             "offset + (first + i) // columns * row + (first + i) % columns of its tensor, offset "
             "+ first + i where "
             "columns is 0.");
}

}  // namespace fm
