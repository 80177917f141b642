// Python functions of rowwise.h and rowwise_dropout.h: norms and bias_dropout_add, apart and fused. RMS norm: no mean, no bias.
#include <optional>

#include "extension/arguments.h"

namespace fm {
namespace {

// x (..., h) with h of at least 1, and parameters (h) of its dtype.
void check_norm(const TensorView& x, const TensorView& weight, const TensorView* mean,
                const TensorView& rstd) {
  x.floating().rank(1, 8).contiguous();
  if (x.size(-1) < 1) x.fail("at least one column", "none");
  weight.same_dtype(x).shape({x.size(-1)}).contiguous();
  if (mean) mean->dtype({DType::f32}).shape({rows_of(x)}).contiguous();
  rstd.dtype({DType::f32}).shape({rows_of(x)}).contiguous();
}

LayerNormArgs norm_args(const TensorView& x, const TensorView& weight, const TensorView* bias,
                        const TensorView& y, const TensorView* mean, const TensorView& rstd,
                        double eps) {
  check_norm(x, weight, mean, rstd);
  y.same_dtype(x).same_shape(x).contiguous().disjoint({&weight});
  rstd.disjoint({&x, &weight, &y});
  if (bias) {
    bias->same_dtype(x).same_shape(weight).contiguous();
    for (const TensorView* t : {&y, mean, &rstd}) t->disjoint({bias});
    mean->disjoint({&x, &weight, &y});
    rstd.disjoint({mean});
  }
  require(eps >= 0, "eps", "0 or more", std::to_string(eps));
  return {x.data(),
          weight.data(),
          bias ? bias->data() : nullptr,
          y.data(),
          mean ? mean->data<float>() : nullptr,
          rstd.data<float>(),
          rows_of(x),
          x.size(-1),
          static_cast<float>(eps),
          x.dtype()};
}

LayerNormGradArgs norm_grad_args(const TensorView& dy, const std::optional<TensorView>& add,
                                 const TensorView& x, const TensorView* mean,
                                 const TensorView& rstd, const TensorView& weight,
                                 const TensorView& dx, const TensorView& dweight,
                                 const TensorView* dbias) {
  check_norm(x, weight, mean, rstd);
  dy.same_dtype(x).same_shape(x).contiguous();
  dx.same_dtype(x).same_shape(x).contiguous().same_or_disjoint({&dy}).disjoint(
      {&x, &weight, &rstd});
  if (mean) dx.disjoint({mean});
  if (add) {
    add->same_dtype(x).same_shape(x).contiguous();
    dx.same_or_disjoint({&*add});
  }
  if (dbias) dweight.disjoint({dbias});
  for (const TensorView* sum : {&dweight, dbias}) {
    if (!sum) continue;
    sum->dtype({DType::f32})
        .same_shape(weight)
        .contiguous()
        .disjoint({&dy, &x, &rstd, &weight, &dx});
    if (mean) sum->disjoint({mean});
    if (add) sum->disjoint({&*add});
  }
  return {dy.data(),
          add ? add->data() : nullptr,
          x.data(),
          weight.data(),
          mean ? mean->data<float>() : nullptr,
          rstd.data<float>(),
          dx.data(),
          dweight.data<float>(),
          dbias ? dbias->data<float>() : nullptr,
          rows_of(x),
          x.size(-1),
          x.dtype()};
}

DropoutArgs dropout_args(const TensorView& x, double p, uint64_t seed, uint64_t stream,
                         int64_t first_sample, int64_t row0) {
  x.floating().rank(3).contiguous();
  require(p >= 0 && p < 1, "p", "a probability in [0, 1)", std::to_string(p));
  require(first_sample >= 0, "first_sample", "0 or more", std::to_string(first_sample));
  require(row0 >= 0 && row0 + x.size(0) <= INT64_C(1) << 32, "row0",
          "rows of a sample in [0, 2**32)",
          std::to_string(row0) + " to " + std::to_string(row0 + x.size(0)));
  return {x.size(0),
          x.size(1),
          1,
          x.size(2),
          static_cast<float>(p),
          {seed, stream, first_sample, row0, 0}};
}

ResidualArgs residual_args(const TensorView& x, const std::optional<TensorView>& bias,
                           const TensorView& residual, const TensorView& out,
                           const DropoutArgs& dropout) {
  residual.same_dtype(x).same_shape(x).contiguous();
  out.same_dtype(x).same_shape(x).contiguous().same_or_disjoint({&x, &residual});
  if (bias) {
    bias->same_dtype(x).shape({x.size(-1)}).contiguous();
    out.disjoint({&*bias});
  }
  return {x.data(), bias ? bias->data() : nullptr, residual.data(), out.data(), x.dtype(), dropout};
}

ResidualGradArgs residual_grad_args(const TensorView& dout, const std::optional<TensorView>& dx,
                                    const std::optional<TensorView>& dbias,
                                    const DropoutArgs& dropout) {
  if (dx) dx->same_dtype(dout).same_shape(dout).contiguous().same_or_disjoint({&dout});
  if (!dx && dropout.p > 0)
    throw py::value_error("dx: expected a tensor, since p is not 0, got None");
  if (dbias) {
    dbias->dtype({DType::f32}).shape({dout.size(-1)}).contiguous().disjoint({&dout});
    if (dx) dbias->disjoint({&*dx});
  }
  return {dout.data(), dx ? dx->data() : nullptr, dbias ? dbias->data<float>() : nullptr,
          dout.dtype(), dropout};
}

Call bind_layer_norm(py::handle x_object, py::handle weight_object, py::handle bias_object,
                     py::handle y_object, py::handle mean_object, py::handle rstd_object,
                     double eps) {
  TensorView x("x", x_object), weight("weight", weight_object), bias("bias", bias_object),
      y("y", y_object), mean("mean", mean_object), rstd("rstd", rstd_object);
  const LayerNormArgs args = norm_args(x, weight, &bias, y, &mean, rstd, eps);
  y.same_or_disjoint({&x});
  return [args] { kernels().layer_norm(args); };
}

void bind_layer_norm_backward(py::handle dy_object, py::handle x_object, py::handle mean_object,
                              py::handle rstd_object, py::handle weight_object,
                              py::handle dx_object, py::handle dweight_object,
                              py::handle dbias_object, py::handle add_object) {
  TensorView dy("dy", dy_object), x("x", x_object), mean("mean", mean_object),
      rstd("rstd", rstd_object), weight("weight", weight_object), dx("dx", dx_object),
      dweight("dweight", dweight_object), dbias("dbias", dbias_object);
  const auto args = norm_grad_args(dy, optional_view("add", add_object), x, &mean, rstd, weight, dx,
                                   dweight, &dbias);
  unlocked([&] { kernels().layer_norm_backward(args); });
}

Call bind_rms_norm(py::handle x_object, py::handle weight_object, py::handle y_object,
                   py::handle rstd_object, double eps) {
  TensorView x("x", x_object), weight("weight", weight_object), y("y", y_object),
      rstd("rstd", rstd_object);
  const LayerNormArgs args = norm_args(x, weight, nullptr, y, nullptr, rstd, eps);
  y.same_or_disjoint({&x});
  return [args] { kernels().rms_norm(args); };
}

void bind_rms_norm_backward(py::handle dy_object, py::handle x_object, py::handle rstd_object,
                            py::handle weight_object, py::handle dx_object,
                            py::handle dweight_object, py::handle add_object) {
  TensorView dy("dy", dy_object), x("x", x_object), rstd("rstd", rstd_object),
      weight("weight", weight_object), dx("dx", dx_object), dweight("dweight", dweight_object);
  const auto add = optional_view("add", add_object);
  const auto args = norm_grad_args(dy, add, x, nullptr, rstd, weight, dx, dweight, nullptr);
  unlocked([&] { kernels().rms_norm_backward(args); });
}

Call bind_bias_dropout_add(py::handle x_object, py::handle bias_object, py::handle residual_object,
                           py::handle out_object, double p, uint64_t seed, uint64_t stream,
                           int64_t first_sample, int64_t row0) {
  TensorView x("x", x_object), residual("residual", residual_object), out("out", out_object);
  const DropoutArgs dropout = dropout_args(x, p, seed, stream, first_sample, row0);
  const ResidualArgs args =
      residual_args(x, optional_view("bias", bias_object), residual, out, dropout);
  if (!x.numel()) return [] {};
  return [args] { kernels().bias_dropout_add(args); };
}

void bind_bias_dropout_add_backward(py::handle dout_object, py::handle dx_object,
                                    py::handle dbias_object, double p, uint64_t seed,
                                    uint64_t stream, int64_t first_sample, int64_t row0) {
  TensorView dout("dout", dout_object);
  const DropoutArgs dropout = dropout_args(dout, p, seed, stream, first_sample, row0);
  const ResidualGradArgs args = residual_grad_args(dout, optional_view("dx", dx_object),
                                                   optional_view("dbias", dbias_object), dropout);
  if (dout.numel()) unlocked([&] { kernels().bias_dropout_add_backward(args); });
}

Call bind_fused(py::handle x_object, py::handle bias_object, py::handle residual_object,
                py::handle sum_object, py::handle weight_object, py::handle norm_bias_object,
                py::handle y_object, py::handle mean_object, py::handle rstd_object, double eps,
                double p, uint64_t seed, uint64_t stream, int64_t first_sample, int64_t row0) {
  TensorView x("x", x_object), residual("residual", residual_object), sum("sum", sum_object),
      weight("weight", weight_object), norm_bias("norm_bias", norm_bias_object), y("y", y_object),
      mean("mean", mean_object), rstd("rstd", rstd_object);
  const auto bias = optional_view("bias", bias_object);
  const ResidualArgs add =
      residual_args(x, bias, residual, sum, dropout_args(x, p, seed, stream, first_sample, row0));
  const LayerNormArgs norm = norm_args(sum, weight, &norm_bias, y, &mean, rstd, eps);
  y.disjoint({&x, &residual, &sum});
  sum.disjoint({&weight, &norm_bias, &mean, &rstd});
  if (!x.numel()) return [] {};
  return [add, norm] { kernels().bias_dropout_add_layer_norm(add, norm); };
}

Call bind_fused_rms(py::handle x_object, py::handle bias_object, py::handle residual_object,
                    py::handle sum_object, py::handle weight_object, py::handle y_object,
                    py::handle rstd_object, double eps, double p, uint64_t seed, uint64_t stream,
                    int64_t first_sample, int64_t row0) {
  TensorView x("x", x_object), residual("residual", residual_object), sum("sum", sum_object),
      weight("weight", weight_object), y("y", y_object), rstd("rstd", rstd_object);
  const DropoutArgs dropout = dropout_args(x, p, seed, stream, first_sample, row0);
  const ResidualArgs add =
      residual_args(x, optional_view("bias", bias_object), residual, sum, dropout);
  const LayerNormArgs norm = norm_args(sum, weight, nullptr, y, nullptr, rstd, eps);
  y.disjoint({&x, &residual, &sum});
  sum.disjoint({&weight, &rstd});
  if (!x.numel()) return [] {};
  return [add, norm] { kernels().bias_dropout_add_rms_norm(add, norm); };
}

void bind_fused_backward(py::handle dy_object, py::handle dsum_object, py::handle sum_object,
                         py::handle mean_object, py::handle rstd_object, py::handle weight_object,
                         py::handle dresidual_object, py::handle dx_object,
                         py::handle dweight_object, py::handle dnorm_bias_object,
                         py::handle dbias_object, double p, uint64_t seed, uint64_t stream,
                         int64_t first_sample, int64_t row0) {
  TensorView dy("dy", dy_object), sum("sum", sum_object), mean("mean", mean_object),
      rstd("rstd", rstd_object), weight("weight", weight_object),
      dresidual("dresidual", dresidual_object), dweight("dweight", dweight_object),
      dnorm_bias("dnorm_bias", dnorm_bias_object);
  const auto dsum = optional_view("dsum", dsum_object), dx = optional_view("dx", dx_object),
             dbias = optional_view("dbias", dbias_object);
  const DropoutArgs dropout = dropout_args(sum, p, seed, stream, first_sample, row0);
  const auto norm =
      norm_grad_args(dy, dsum, sum, &mean, rstd, weight, dresidual, dweight, &dnorm_bias);
  const ResidualGradArgs add = residual_grad_args(dresidual, dx, dbias, dropout);
  if (dx)
    dx->disjoint({&dresidual, &sum, &mean, &rstd, &weight, &dweight, &dnorm_bias})
        .same_or_disjoint({&dy});
  if (dx && dsum) dx->same_or_disjoint({&*dsum});
  if (dbias) dbias->disjoint({&dy, &sum, &mean, &rstd, &weight, &dweight, &dnorm_bias});
  if (sum.numel()) unlocked([&] { kernels().bias_dropout_add_layer_norm_backward(norm, add); });
}

void bind_fused_rms_backward(py::handle dy_object, py::handle dsum_object, py::handle sum_object,
                             py::handle rstd_object, py::handle weight_object,
                             py::handle dresidual_object, py::handle dx_object,
                             py::handle dweight_object, py::handle dbias_object, double p,
                             uint64_t seed, uint64_t stream, int64_t first_sample, int64_t row0) {
  TensorView dy("dy", dy_object), sum("sum", sum_object), rstd("rstd", rstd_object),
      weight("weight", weight_object), dresidual("dresidual", dresidual_object),
      dweight("dweight", dweight_object);
  const auto dsum = optional_view("dsum", dsum_object), dx = optional_view("dx", dx_object),
             dbias = optional_view("dbias", dbias_object);
  const DropoutArgs dropout = dropout_args(sum, p, seed, stream, first_sample, row0);
  const auto norm =
      norm_grad_args(dy, dsum, sum, nullptr, rstd, weight, dresidual, dweight, nullptr);
  const ResidualGradArgs add = residual_grad_args(dresidual, dx, dbias, dropout);
  if (dx) dx->disjoint({&dresidual, &sum, &rstd, &weight, &dweight}).same_or_disjoint({&dy});
  if (dx && dsum) dx->same_or_disjoint({&*dsum});
  if (dbias) dbias->disjoint({&dy, &sum, &rstd, &weight, &dweight});
  if (sum.numel()) unlocked([&] { kernels().bias_dropout_add_rms_norm_backward(norm, add); });
}

const char LAYER_NORM_DOC[] = R"(y = (x - mean) rstd weight + bias over the last dimension.

x, y: (..., h) float32, bfloat16 or float16, contiguous; y may be x. weight, bias: (h) in x's dtype.
mean, rstd: float32 (rows), rows = product of x's other dimensions; rstd = 1 / sqrt(variance + eps).)";

const char LAYER_NORM_BACKWARD_DOC[] =
    R"(dx = add + gradient of layer_norm; dweight and dbias (float32, (h)) are added to.

add: None or a gradient of x from elsewhere (the residual's). dx may be dy or add. The sums over rows have the same bits for
any number of threads.)";

const char RMS_NORM_DOC[] =
    R"(y = x rstd weight over the last dimension, rstd = 1 / sqrt(mean(x^2) + eps), float32 (rows).

x, y, weight: as in layer_norm.)";

const char RMS_NORM_BACKWARD_DOC[] =
    R"(dx = add + gradient of rms_norm; dweight (float32, (h)) is added to.

add, dx: as in layer_norm_backward.)";

const char ADD_DOC[] =
    R"(out = residual + dropout(x + bias), the mask being that of dropout(x, sample_dim=1).

x, residual, out: (s, b, h) in one dtype, contiguous; out may be x or residual. bias: (h) or None. p = 0 needs no numbers.)";

const char ADD_BACKWARD_DOC[] =
    R"(Gradients of bias_dropout_add: dx = dropout(dout), dbias (float32, (h)) += its sum over rows.

dx: may be dout, and None when p = 0, where it is dout. dbias: None when there was no bias. The residual's gradient is dout.)";

const char FUSED_DOC[] =
    R"(sum = residual + dropout(x + bias) as bias_dropout_add, then y = layer_norm(sum), in one pass.

sum may be x or residual; y is apart from them.)";

const char FUSED_BACKWARD_DOC[] =
    R"(Gradients of bias_dropout_add_layer_norm in one pass, from dy and from dsum (None: none).

dresidual = dsum + gradient of layer_norm; dx = dropout(dresidual), None when p = 0, where it is dresidual. dweight, dnorm_bias
and dbias (None without bias) are float32 (h) and added to. dresidual may be dy or dsum, dx may be the other of them.)";

const char FUSED_RMS_DOC[] =
    R"(sum = residual + dropout(x + bias) as bias_dropout_add, then y = rms_norm(sum), in one pass.

sum may be x or residual; y is apart from them.)";

const char FUSED_RMS_BACKWARD_DOC[] =
    R"(Gradients of bias_dropout_add_rms_norm in one pass, from dy and from dsum (None: none).

The arguments are those of bias_dropout_add_layer_norm_backward; dweight and dbias (None without bias) are added to.)";

}  // namespace

FM_BIND(rowwise) {
  using namespace py::literals;
  def_repeatable(module, "layer_norm", &bind_layer_norm, "x"_a, "weight"_a, "bias"_a, "y"_a,
                 "mean"_a, "rstd"_a, "eps"_a, LAYER_NORM_DOC);
  module.def("layer_norm_backward", &bind_layer_norm_backward, "dy"_a, "x"_a, "mean"_a, "rstd"_a,
             "weight"_a, "dx"_a, "dweight"_a, "dbias"_a, "add"_a = py::none(),
             LAYER_NORM_BACKWARD_DOC);
  def_repeatable(module, "rms_norm", &bind_rms_norm, "x"_a, "weight"_a, "y"_a, "rstd"_a, "eps"_a,
                 RMS_NORM_DOC);
  module.def("rms_norm_backward", &bind_rms_norm_backward, "dy"_a, "x"_a, "rstd"_a, "weight"_a,
             "dx"_a, "dweight"_a, "add"_a = py::none(), RMS_NORM_BACKWARD_DOC);
  def_repeatable(module, "bias_dropout_add", &bind_bias_dropout_add, "x"_a, "bias"_a, "residual"_a,
                 "out"_a, "p"_a = 0.0, "seed"_a = 0, "stream"_a = 0, "first_sample"_a = 0,
                 "row0"_a = 0, ADD_DOC);
  module.def("bias_dropout_add_backward", &bind_bias_dropout_add_backward, "dout"_a, "dx"_a,
             "dbias"_a, "p"_a = 0.0, "seed"_a = 0, "stream"_a = 0, "first_sample"_a = 0,
             "row0"_a = 0, ADD_BACKWARD_DOC);
  def_repeatable(module, "bias_dropout_add_layer_norm", &bind_fused, "x"_a, "bias"_a, "residual"_a,
                 "sum"_a, "weight"_a, "norm_bias"_a, "y"_a, "mean"_a, "rstd"_a, "eps"_a,
                 "p"_a = 0.0, "seed"_a = 0, "stream"_a = 0, "first_sample"_a = 0, "row0"_a = 0,
                 FUSED_DOC);
  module.def("bias_dropout_add_layer_norm_backward", &bind_fused_backward, "dy"_a, "dsum"_a,
             "sum"_a, "mean"_a, "rstd"_a, "weight"_a, "dresidual"_a, "dx"_a, "dweight"_a,
             "dnorm_bias"_a, "dbias"_a, "p"_a = 0.0, "seed"_a = 0, "stream"_a = 0,
             "first_sample"_a = 0, "row0"_a = 0, FUSED_BACKWARD_DOC);
  def_repeatable(module, "bias_dropout_add_rms_norm", &bind_fused_rms, "x"_a, "bias"_a,
                 "residual"_a, "sum"_a, "weight"_a, "y"_a, "rstd"_a, "eps"_a, "p"_a = 0.0,
                 "seed"_a = 0, "stream"_a = 0, "first_sample"_a = 0, "row0"_a = 0, FUSED_RMS_DOC);
  module.def("bias_dropout_add_rms_norm_backward", &bind_fused_rms_backward, "dy"_a, "dsum"_a,
             "sum"_a, "rstd"_a, "weight"_a, "dresidual"_a, "dx"_a, "dweight"_a, "dbias"_a,
             "p"_a = 0.0, "seed"_a = 0, "stream"_a = 0, "first_sample"_a = 0, "row0"_a = 0,
             FUSED_RMS_BACKWARD_DOC);
}

}  // namespace fm
