// Python functions of delta_net.h.
#include "extension/arguments.h"

namespace fm {
namespace {

// Sizes of qkv (.., 2 groups d + heads dv), of gates (.., heads) and of states (.., heads, d, dv).
DeltaArgs delta_args(const TensorView& qkv, const TensorView& decay, const TensorView& beta,
                     const TensorView& states) {
  const int64_t heads = states.size(-3), d = states.size(-2), dv = states.size(-1);
  states.dtype({DType::f32}).contiguous().aligned(4);
  require(heads > 0 && d > 0 && dv > 0, "states", "heads, d and dv above 0",
          std::to_string(heads) + ", " + std::to_string(d) + " and " + std::to_string(dv));
  const int64_t width = qkv.size(-1) - heads * dv, groups = width / (2 * d);
  require(groups > 0 && width == 2 * groups * d && heads % groups == 0, "qkv",
          "2 groups d + heads dv columns with " + std::to_string(heads) + " heads, d " +
              std::to_string(d) + ", dv " + std::to_string(dv) +
              " (of states) and groups that divide the heads",
          std::to_string(qkv.size(-1)) + " columns");
  for (const TensorView* gate : {&decay, &beta}) {
    gate->dtype({DType::f32}).rank(qkv.rank()).contiguous().aligned(4);
    qkv.rank() == 3 ? gate->shape({qkv.size(0), qkv.size(1), heads})
                    : gate->shape({qkv.size(0), heads});
  }
  const int64_t s = qkv.rank() == 3 ? qkv.size(0) : 1;
  return {s,
          qkv.size(-2),
          groups,
          heads,
          d,
          dv,
          qkv.data(),
          decay.data<float>(),
          beta.data<float>(),
          qkv.dtype()};
}

DeltaArgs delta_sequence_args(const TensorView& qkv, const TensorView& decay,
                              const TensorView& beta, const TensorView& states, py::handle starts) {
  qkv.floating().rank(3).contiguous();
  states.rank(5);
  DeltaArgs args = delta_args(qkv, decay, beta, states);
  states.shape(
      {(args.s + DELTA_SEGMENT - 1) / DELTA_SEGMENT + 1, args.b, args.heads, args.d, args.dv});
  args.starts = document_starts(starts, args.b, args.s);
  args.states = states.data<float>();
  return args;
}

void bind_delta_forward(py::handle qkv_object, py::handle decay_object, py::handle beta_object,
                        py::handle states_object, py::handle out_object, py::handle starts) {
  TensorView qkv("qkv", qkv_object), decay("decay", decay_object), beta("beta", beta_object),
      states("states", states_object), out("out", out_object);
  const DeltaArgs args = delta_sequence_args(qkv, decay, beta, states, starts);
  out.same_dtype(qkv).shape({args.s, args.b, args.heads * args.dv}).contiguous();
  out.disjoint({&qkv, &decay, &beta, &states});
  states.disjoint({&qkv, &decay, &beta});
  unlocked([&] { kernels().delta_rule_forward(args, out.data(), states.data<float>()); });
}

void bind_delta_backward(py::handle qkv_object, py::handle decay_object, py::handle beta_object,
                         py::handle states_object, py::handle dout_object, py::handle dstate_object,
                         py::handle dqkv_object, py::handle ddecay_object, py::handle dbeta_object,
                         py::handle starts) {
  TensorView qkv("qkv", qkv_object), decay("decay", decay_object), beta("beta", beta_object),
      states("states", states_object), dout("dout", dout_object);
  TensorView dstate("dstate", dstate_object), dqkv("dqkv", dqkv_object),
      ddecay("ddecay", ddecay_object), dbeta("dbeta", dbeta_object);
  const DeltaArgs args = delta_sequence_args(qkv, decay, beta, states, starts);
  dout.same_dtype(qkv).shape({args.s, args.b, args.heads * args.dv}).contiguous();
  dstate.dtype({DType::f32})
      .shape({args.b, args.heads, args.d, args.dv})
      .contiguous()
      .aligned(4)
      .disjoint({&qkv, &decay, &beta, &states, &dout});
  dqkv.same_dtype(qkv).same_shape(qkv).contiguous().disjoint(
      {&qkv, &decay, &beta, &states, &dout, &dstate});
  for (const TensorView* gradient : {&ddecay, &dbeta}) {
    gradient->dtype({DType::f32}).same_shape(decay).contiguous().aligned(4);
    gradient->disjoint({&qkv, &decay, &beta, &states, &dout, &dstate, &dqkv});
  }
  ddecay.disjoint({&dbeta});
  const DeltaGradArgs grad = {dout.data(), dqkv.data(), ddecay.data<float>(), dbeta.data<float>(),
                              dstate.data<float>()};
  unlocked([&] { kernels().delta_rule_backward(args, grad); });
}

// Numbers of samples below `count`, one for each row.
const int64_t* sample_numbers(const TensorView& samples, int64_t rows, int64_t count) {
  samples.dtype({DType::i64}).shape({rows}).contiguous().aligned(8);
  const int64_t* numbers = samples.data<int64_t>();
  for (int64_t row = 0; row < rows; ++row) {
    require(numbers[row] >= 0 && numbers[row] < count, "samples",
            "numbers below " + std::to_string(count), std::to_string(numbers[row]));
  }
  return numbers;
}

Call bind_delta_decode(py::handle qkv_object, py::handle decay_object, py::handle beta_object,
                       py::handle states_object, py::handle samples_object, py::handle out_object) {
  TensorView qkv("qkv", qkv_object), decay("decay", decay_object), beta("beta", beta_object),
      states("states", states_object), samples("samples", samples_object), out("out", out_object);
  qkv.floating().rank(2).contiguous();
  states.rank(4);
  const DeltaArgs args = delta_args(qkv, decay, beta, states);
  const int64_t* numbers = sample_numbers(samples, args.b, states.size(0));
  out.same_dtype(qkv).shape({args.b, args.heads * args.dv}).contiguous();
  states.disjoint({&qkv, &decay, &beta, &samples});
  out.disjoint({&qkv, &decay, &beta, &states, &samples});
  return [args, numbers, states = states.data<float>(), out = out.data()] {
    kernels().delta_rule_decode(args, numbers, states, out);
  };
}

// Rows of x, of which those of a sequence are equally far apart.
int64_t token_stride(const TensorView& x) {
  x.last_contiguous();
  if (x.rank() == 2 || x.size(1) == 1) return x.stride(0);
  const bool regular = x.size(0) <= 1 || x.size(1) == 0 || x.stride(0) == x.size(1) * x.stride(1);
  if (!regular) x.fail("rows of all tokens equally far apart", "another stride of dimension 0");
  return x.stride(1);
}

ConvolutionArgs convolution_args(const TensorView& x, const TensorView& weight) {
  weight.same_dtype(x).rank(2).shape({x.size(-1), -1}).contiguous();
  require(weight.size(1) >= 1 && weight.size(1) <= 8, "weight", "1 to 8 taps",
          std::to_string(weight.size(1)));
  const int64_t s = x.rank() == 3 ? x.size(0) : 1;
  return {s,       x.size(-2), x.size(-1), weight.size(1), x.data(), token_stride(x), weight.data(),
          nullptr, x.dtype()};
}

void convolution_edges(ConvolutionArgs& args, const TensorView& x, py::handle starts,
                       const std::optional<TensorView>& earlier) {
  args.starts = document_starts(starts, args.b, args.s);
  if (!earlier) return;
  earlier->same_dtype(x).shape({args.taps - 1, args.b, args.cols}).contiguous();
  args.earlier = earlier->data();
}

void bind_convolution(py::handle x_object, py::handle weight_object, py::handle y_object,
                      py::handle starts, py::handle earlier_object) {
  TensorView x("x", x_object), weight("weight", weight_object), y("y", y_object);
  const auto earlier = optional_view("earlier", earlier_object);
  x.floating().rank(3);
  ConvolutionArgs args = convolution_args(x, weight);
  convolution_edges(args, x, starts, earlier);
  y.same_dtype(x).same_shape(x).contiguous().disjoint({&x, &weight});
  if (earlier) y.disjoint({&*earlier});
  unlocked([&] { kernels().convolution_forward(args, y.data()); });
}

void bind_convolution_backward(py::handle dy_object, py::handle x_object, py::handle weight_object,
                               py::handle dx_object, py::handle dweight_object, py::handle starts,
                               py::handle earlier_object, py::handle dearlier_object) {
  TensorView dy("dy", dy_object), x("x", x_object), weight("weight", weight_object),
      dx("dx", dx_object), dweight("dweight", dweight_object);
  const auto earlier = optional_view("earlier", earlier_object),
             dearlier = optional_view("dearlier", dearlier_object);
  x.floating().rank(3);
  ConvolutionArgs args = convolution_args(x, weight);
  convolution_edges(args, x, starts, earlier);
  dy.same_dtype(x).same_shape(x).contiguous();
  dx.same_dtype(x).same_shape(x).contiguous().disjoint({&dy, &x, &weight});
  dweight.dtype({DType::f32}).same_shape(weight).contiguous().aligned(4);
  dweight.disjoint({&dy, &x, &weight, &dx});
  if (dearlier) {
    dearlier->same_dtype(x).shape({args.taps - 1, args.b, args.cols}).contiguous();
    dearlier->disjoint({&dy, &x, &weight, &dx, &dweight});
  }
  const ConvolutionGradArgs grad = {dy.data(), dx.data(), dearlier ? dearlier->data() : nullptr,
                                    dweight.data<float>()};
  unlocked([&] { kernels().convolution_backward(args, grad); });
}

Call bind_convolution_decode(py::handle x_object, py::handle weight_object,
                             py::handle inputs_object, py::handle samples_object,
                             py::handle y_object) {
  TensorView x("x", x_object), weight("weight", weight_object), inputs("inputs", inputs_object),
      samples("samples", samples_object), y("y", y_object);
  x.floating().rank(2);
  const ConvolutionArgs args = convolution_args(x, weight);
  inputs.same_dtype(x).shape({-1, args.taps - 1, args.cols}).contiguous().disjoint({&x, &weight});
  const int64_t* numbers = sample_numbers(samples, args.b, inputs.size(0));
  y.same_dtype(x).same_shape(x).contiguous().disjoint({&x, &weight, &inputs, &samples});
  return [args, numbers, inputs = inputs.data(), y = y.data()] {
    kernels().convolution_decode(args, numbers, inputs, y);
  };
}

GatedNormArgs gated_norm_args(const TensorView& x, const TensorView& gate, const TensorView& weight,
                              float eps) {
  x.floating().rank(3).contiguous();
  gate.same_dtype(x).same_shape(x).last_contiguous();
  if (gate.size(1) > 1 && gate.stride(1) != gate.size(2))
    gate.fail("heads side by side", "stride " + std::to_string(gate.stride(1)));
  weight.same_dtype(x).shape({x.size(2)}).contiguous();
  return {x.size(0) * x.size(1), x.size(1),     x.size(2), x.data(), gate.data(),
          gate.stride(0),        weight.data(), eps,       x.dtype()};
}

Call bind_gated_norm(py::handle x_object, py::handle gate_object, py::handle weight_object,
                     py::handle y_object, float eps) {
  TensorView x("x", x_object), gate("gate", gate_object), weight("weight", weight_object),
      y("y", y_object);
  const GatedNormArgs args = gated_norm_args(x, gate, weight, eps);
  y.same_dtype(x).same_shape(x).contiguous().disjoint({&x, &gate, &weight});
  if (!x.numel()) return [] {};
  return [args, y = y.data()] { kernels().gated_norm(args, y); };
}

void bind_gated_norm_backward(py::handle dy_object, py::handle x_object, py::handle gate_object,
                              py::handle weight_object, py::handle dx_object,
                              py::handle dgate_object, py::handle dweight_object, float eps) {
  TensorView dy("dy", dy_object), x("x", x_object), gate("gate", gate_object),
      weight("weight", weight_object), dx("dx", dx_object), dgate("dgate", dgate_object),
      dweight("dweight", dweight_object);
  const GatedNormArgs args = gated_norm_args(x, gate, weight, eps);
  dy.same_dtype(x).same_shape(x).contiguous();
  dx.same_dtype(x).same_shape(x).contiguous().disjoint({&dy, &x, &gate, &weight});
  dgate.same_dtype(x).same_shape(x).contiguous().disjoint({&dy, &x, &gate, &weight, &dx});
  dweight.dtype({DType::f32}).same_shape(weight).contiguous().aligned(4);
  dweight.disjoint({&dy, &x, &gate, &weight, &dx, &dgate});
  if (!x.numel()) return;
  const GatedNormGradArgs grad = {dy.data(), dx.data(), dgate.data(), dweight.data<float>()};
  unlocked([&] { kernels().gated_norm_backward(args, grad); });
}

}  // namespace

FM_BIND(delta_net) {
  using namespace py::literals;
  module.attr("DELTA_SEGMENT") = DELTA_SEGMENT;
  module.def(
      "delta_rule_forward", &bind_delta_forward, "qkv"_a, "decay"_a, "beta"_a, "states"_a, "out"_a,
      "starts"_a = py::none(),
      "The gated delta rule. qkv: float32, bfloat16 or float16 (s, b, 2 groups d + heads dv), of "
      "each group its query,\n"
      "its key, and the values of its heads / groups consecutive heads. decay, beta: float32 (s, "
      "b, "
      "heads), log decays and strengths.\n"
      "states: float32 (segments + 1, b, heads, d, dv), the first of which is read, and those "
      "before each later segment of\n"
      "DELTA_SEGMENT tokens and after the last token are written. out: (s, b, heads dv). All "
      "contiguous. Sums are float32.\n"
      "starts: int32 (b, s), where the document of each token begins, before which the state is "
      "zero. None: each sample is\n"
      "one document, which continues the first state.");
  module.def("delta_rule_backward", &bind_delta_backward, "qkv"_a, "decay"_a, "beta"_a, "states"_a,
             "dout"_a, "dstate"_a, "dqkv"_a, "ddecay"_a, "dbeta"_a, "starts"_a = py::none(),
             "Writes the gradients of qkv, decay and beta from dout and what delta_rule_forward "
             "was given and gave. dstate: float32\n"
             "(b, heads, d, dv), the gradient of the last state, which becomes that of the first.");
  def_repeatable(
      module, "delta_rule_decode", &bind_delta_decode, "qkv"_a, "decay"_a, "beta"_a, "states"_a,
      "samples"_a, "out"_a,
      "The delta rule of one new token of each of `rows` samples: qkv (rows, ...), decay "
      "and beta (rows, heads),\n"
      "out (rows, heads dv). states: float32 (all samples, heads, d, dv), updated. "
      "samples: int64 (rows), no two the same.");
  module.def("convolution_forward", &bind_convolution, "x"_a, "weight"_a, "y"_a,
             "starts"_a = py::none(), "earlier"_a = py::none(),
             "y = silu of the causal depthwise convolution of x (s, b, cols) with weight (cols, "
             "taps), the token itself last.\n"
             "Rows of x may be strided. starts: as in delta_rule_forward; a token reads no earlier "
             "document. earlier: the taps - 1\n"
             "inputs before the first token (taps - 1, b, cols), which belong to its document; "
             "None: zeros.");
  module.def("convolution_backward", &bind_convolution_backward, "dy"_a, "x"_a, "weight"_a, "dx"_a,
             "dweight"_a, "starts"_a = py::none(), "earlier"_a = py::none(),
             "dearlier"_a = py::none(),
             "Writes dx and dearlier, the gradients of x and earlier, and adds that of the weight "
             "to dweight (float32).");
  def_repeatable(module, "convolution_decode", &bind_convolution_decode, "x"_a, "weight"_a,
                 "inputs"_a, "samples"_a, "y"_a,
                 "convolution_forward of one new token of each of `rows` samples, x (rows, cols). "
                 "inputs (all samples, taps - 1, cols):\n"
                 "the last inputs of each sample, to which x is appended. samples: int64 (rows), "
                 "no two the same.");
  def_repeatable(
      module, "gated_norm", &bind_gated_norm, "x"_a, "gate"_a, "weight"_a, "y"_a, "eps"_a,
      "y = x / sqrt(mean(x^2) + eps) * weight * silu(gate) for each of heads of tokens, x "
      "(tokens, heads, cols).\n"
      "gate: the same shape; its tokens may be strided.");
  module.def("gated_norm_backward", &bind_gated_norm_backward, "dy"_a, "x"_a, "gate"_a, "weight"_a,
             "dx"_a, "dgate"_a, "dweight"_a, "eps"_a,
             "Writes dx and dgate, and adds the weight's gradient to dweight (float32).");
}

}  // namespace fm
