// Python function of adamw.h.
#include <cmath>

#include "tensor_view.h"

namespace fm {
namespace {

AdamWArgs adamw_args(double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step,
                     double grad_scale) {
  auto beta_check = [](const char* name, double beta) {
    if (!(beta >= 0 && beta < 1))
      throw py::value_error(std::string(name) + ": expected a number in [0, 1), got " + std::to_string(beta));
  };
  beta_check("beta1", beta1);
  beta_check("beta2", beta2);
  if (!(eps > 0)) throw py::value_error("eps: expected more than 0, got " + std::to_string(eps));
  if (step < 1) throw py::value_error("step: expected 1 or more, got " + std::to_string(step));
  const double correction1 = 1 - std::pow(beta1, step), correction2 = 1 - std::pow(beta2, step);
  return {float(grad_scale),       float(1 - lr * weight_decay),      float(1 - beta1), float(beta2), float(1 - beta2),
          float(lr / correction1), float(1 / std::sqrt(correction2)), float(eps)};
}

void bind_step(py::handle param_object, py::handle grad_object, py::handle exp_avg_object, py::handle exp_avg_sq_object,
               double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step, double grad_scale,
               py::object copy_object) {
  TensorView param("param", param_object), grad("grad", grad_object), exp_avg("exp_avg", exp_avg_object),
      exp_avg_sq("exp_avg_sq", exp_avg_sq_object);
  param.dtype({DType::f32}).contiguous();
  for (const TensorView* t : {&grad, &exp_avg, &exp_avg_sq})
    t->dtype({DType::f32}).same_shape(param).contiguous().disjoint({&param});
  exp_avg.disjoint({&grad, &exp_avg_sq});
  exp_avg_sq.disjoint({&grad});
  const AdamWArgs args = adamw_args(lr, beta1, beta2, eps, weight_decay, step, grad_scale);
  void* copy = nullptr;
  DType copy_dtype = DType::f32;
  if (!copy_object.is_none()) {
    TensorView view("copy", copy_object);
    view.floating().same_shape(param).contiguous().disjoint({&param, &grad, &exp_avg, &exp_avg_sq});
    copy = view.data();
    copy_dtype = view.dtype();
  }
  unlocked([&] {
    kernels().adamw(param.data<float>(), grad.data<float>(), exp_avg.data<float>(), exp_avg_sq.data<float>(), copy,
                    copy_dtype, param.numel(), args);
  });
}

}  // namespace

FM_BIND(adamw) {
  using namespace py::literals;
  module.def("adamw", &bind_step, "param"_a, "grad"_a, "exp_avg"_a, "exp_avg_sq"_a, "lr"_a, "beta1"_a, "beta2"_a,
             "eps"_a, "weight_decay"_a, "step"_a, "grad_scale"_a = 1.0, "copy"_a = py::none(),
             "One step of torch.optim.AdamW on contiguous float32 tensors, in place; step counts from 1. grad is "
             "multiplied by grad_scale and left\n"
             "as it is. copy: a float32, bfloat16 or float16 tensor that receives the new parameters.");
}

}  // namespace fm
