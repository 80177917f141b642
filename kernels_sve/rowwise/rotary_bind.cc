// Python functions of rotary.h.
#include "extension/arguments.h"

namespace fm {
namespace {

struct Operands {
  TensorView x, cos, sin;
  std::optional<TensorView> q_weight, k_weight, positions;
};

// positions (s, b), each a row of the angles; null for None.
const int32_t* check_positions(const Operands& o) {
  if (!o.positions) return nullptr;
  o.positions->dtype({DType::i32}).shape({o.x.size(0), o.x.size(1)}).contiguous().aligned(4);
  const int32_t* values = o.positions->data<int32_t>();
  for (int64_t i = 0; i < o.positions->numel(); ++i) {
    require(values[i] >= 0 && values[i] < o.cos.size(0), "positions",
            "numbers below " + std::to_string(o.cos.size(0)), std::to_string(values[i]));
  }
  return values;
}

// x (s, b, heads, d) with whole groups of heads, cos and sin (s, half), or with positions of any rows, with 2 half <= d, and y like x.
RotaryArgs rotary_args(const Operands& o, const TensorView& y, int64_t queries, double eps,
                       bool interleaved, bool inverse) {
  o.x.floating().rank(4).contiguous();
  const int64_t heads = o.x.size(2), d = o.x.size(3), half = o.cos.rank(2).size(1);
  require(queries >= 1 && heads % (queries + 2) == 0, "queries",
          "groups of queries + 2 heads that make up x's " + std::to_string(heads),
          std::to_string(queries));
  for (const TensorView* t : {&o.cos, &o.sin}) {
    t->dtype({DType::f32}).shape({o.positions ? o.cos.size(0) : o.x.size(0), half}).contiguous();
    y.disjoint({t});
  }
  if (2 * half > d)
    o.cos.fail("at most half of " + std::to_string(d) + " columns", std::to_string(half));
  y.same_dtype(o.x).same_shape(o.x).contiguous();
  for (const auto* weight : {&o.q_weight, &o.k_weight}) {
    if (*weight) (*weight)->same_dtype(o.x).shape({d}).contiguous(), y.disjoint({&**weight});
  }
  require(eps >= 0, "eps", "0 or more", std::to_string(eps));
  return {o.x.data(),
          o.q_weight ? o.q_weight->data() : nullptr,
          o.k_weight ? o.k_weight->data() : nullptr,
          o.cos.data<float>(),
          o.sin.data<float>(),
          y.data(),
          o.x.size(0),
          o.x.size(1),
          heads,
          queries,
          d,
          half,
          static_cast<float>(eps),
          interleaved,
          inverse,
          o.x.dtype(),
          check_positions(o)};
}

Call turn_heads(py::handle x, py::handle cos, py::handle sin, py::handle y_object, int64_t queries,
                bool interleaved, bool inverse, py::handle positions) {
  const Operands operands{{"x", x},     {"cos", cos}, {"sin", sin},
                          std::nullopt, std::nullopt, optional_view("positions", positions)};
  const TensorView y("y", y_object);
  const RotaryArgs args = rotary_args(operands, y, queries, 0, interleaved, inverse);
  y.same_or_disjoint({&operands.x});
  return [args] { kernels().rotary(args); };
}

Operands norm_operands(py::handle x, py::handle q_weight, py::handle k_weight, py::handle cos,
                       py::handle sin, py::handle positions) {
  return {{"x", x},
          {"cos", cos},
          {"sin", sin},
          TensorView("q_weight", q_weight),
          TensorView("k_weight", k_weight),
          optional_view("positions", positions)};
}

Call norm_and_turn_heads(py::handle x, py::handle q_weight, py::handle k_weight, py::handle cos,
                         py::handle sin, py::handle y_object, int64_t queries, double eps,
                         bool interleaved, py::handle positions) {
  const Operands operands = norm_operands(x, q_weight, k_weight, cos, sin, positions);
  const TensorView y("y", y_object);
  const RotaryArgs args = rotary_args(operands, y, queries, eps, interleaved, false);
  y.same_or_disjoint({&operands.x});
  return [args] { kernels().rotary(args); };
}

void norm_and_turn_heads_backward(py::handle dy_object, py::handle x, py::handle q_weight,
                                  py::handle k_weight, py::handle cos, py::handle sin,
                                  py::handle dx_object, py::handle dq_object, py::handle dk_object,
                                  int64_t queries, double eps, bool interleaved,
                                  py::handle positions) {
  const Operands operands = norm_operands(x, q_weight, k_weight, cos, sin, positions);
  const TensorView dy("dy", dy_object), dx("dx", dx_object), dq("dq_weight", dq_object),
      dk("dk_weight", dk_object);
  const RotaryArgs args = rotary_args(operands, dx, queries, eps, interleaved, false);
  dy.same_dtype(operands.x).same_shape(operands.x).contiguous();
  dx.same_or_disjoint({&dy}).disjoint({&operands.x});
  dq.disjoint({&dk});
  for (const TensorView* sum : {&dq, &dk}) {
    sum->dtype({DType::f32}).shape({args.d}).contiguous();
    sum->disjoint({&dy, &operands.x, &dx, &operands.cos, &operands.sin, &*operands.q_weight,
                   &*operands.k_weight});
  }
  unlocked([&] {
    kernels().rotary_norm_backward(args, {dy.data(), dq.data<float>(), dk.data<float>()});
  });
}

const char ROTARY_DOC[] =
    R"(y = x with each query and key turned by its position's angles; values stay as they are.

x, y: (s, b, heads, d) float32, bfloat16 or float16, contiguous, y may be x; in heads `queries` queries, a key and a value follow one
another, in every group. cos, sin: float32 (s, half) of the positions, 2 half <= d; columns from 2 half on are not turned. A pair is
columns i and i + half, or with interleaved 2 i and 2 i + 1. inverse: by the negative angles, which is also the gradient.
positions: int32 (s, b), the row of cos and sin of each token, which then have any number of rows. None: the token's place in s.)";

const char ROTARY_NORM_DOC[] =
    R"(rotary of queries and keys that an RMS norm over d has scaled: x / sqrt(mean(x^2) + eps) weight.

q_weight, k_weight: (d) in x's dtype. The rest as in rotary; half may be 0.)";

const char ROTARY_NORM_BACKWARD_DOC[] =
    R"(dx = gradient of rotary_norm; dq_weight and dk_weight (float32, (d)) are added to.

dx may be dy. The sums over tokens have the same bits for any number of threads.)";

}  // namespace

FM_BIND(rotary) {
  using namespace py::literals;
  def_repeatable(module, "rotary", &turn_heads, "x"_a, "cos"_a, "sin"_a, "y"_a, "queries"_a,
                 "interleaved"_a = false, "inverse"_a = false, "positions"_a = py::none(),
                 ROTARY_DOC);
  def_repeatable(module, "rotary_norm", &norm_and_turn_heads, "x"_a, "q_weight"_a, "k_weight"_a,
                 "cos"_a, "sin"_a, "y"_a, "queries"_a, "eps"_a, "interleaved"_a = false,
                 "positions"_a = py::none(), ROTARY_NORM_DOC);
  module.def("rotary_norm_backward", &norm_and_turn_heads_backward, "dy"_a, "x"_a, "q_weight"_a,
             "k_weight"_a, "cos"_a, "sin"_a, "dx"_a, "dq_weight"_a, "dk_weight"_a, "queries"_a,
             "eps"_a, "interleaved"_a = false, "positions"_a = py::none(),
             ROTARY_NORM_BACKWARD_DOC);
}

}  // namespace fm
