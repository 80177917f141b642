// Python functions of cross_entropy.h.
#include "extension/arguments.h"

namespace fm {
namespace {

// Labels of other ranks are fine; without other ranks (whole) each must be a column, or -1 for a row that is not counted.
CrossEntropyArgs logits_args(const TensorView& logits, const std::optional<TensorView>& labels,
                             int64_t first_row, bool whole) {
  logits.floating().rank(2).contiguous();
  require(logits.size(1) > 0, "logits", "at least one column", "none");
  require(first_row >= 0, "first_row", "0 or more", std::to_string(first_row));
  const int64_t *words = nullptr, cols = logits.size(1);
  if (labels) {
    labels->dtype({DType::i64}).shape({logits.size(0)}).contiguous();
    words = labels->data<int64_t>();
  }
  for (int64_t i = 0; whole && i < logits.size(0); ++i)
    require(words[i] >= -1 && words[i] < cols, "labels",
            "words of the vocabulary, 0 to " + std::to_string(cols - 1) + ", or -1",
            std::to_string(words[i]) + " at " + std::to_string(i));
  return {logits.data(), logits.dtype(), logits.size(0), cols,   words,
          first_row,     nullptr,        nullptr,        nullptr};
}

float* row_floats(const TensorView& t, const TensorView& logits,
                  std::initializer_list<const TensorView*> apart_from) {
  t.dtype({DType::f32})
      .shape({logits.size(0)})
      .contiguous()
      .disjoint({&logits})
      .disjoint(apart_from);
  return t.data<float>();
}

void bind_max(py::handle logits_object, py::handle row_max_object) {
  TensorView logits("logits", logits_object), row_max("row_max", row_max_object);
  CrossEntropyArgs args = logits_args(logits, std::nullopt, 0, false);
  args.row_max = row_floats(row_max, logits, {});
  unlocked([&] { kernels().cross_entropy_max(args); });
}

void bind_sum(py::handle logits_object, py::handle row_max_object, py::handle labels_object,
              int64_t first_row, py::handle sum_exp_object, py::handle target_logit_object) {
  TensorView logits("logits", logits_object), row_max("row_max", row_max_object),
      labels("labels", labels_object), sum_exp("sum_exp", sum_exp_object),
      target_logit("target_logit", target_logit_object);
  CrossEntropyArgs args = logits_args(logits, labels, first_row, false);
  args.row_max = row_floats(row_max, logits, {});
  args.sum_exp = row_floats(sum_exp, logits, {&row_max, &labels});
  args.target_logit = row_floats(target_logit, logits, {&row_max, &labels, &sum_exp});
  unlocked([&] { kernels().cross_entropy_sum(args); });
}

void bind_loss_forward(py::handle logits_object, py::handle labels_object,
                       py::handle row_max_object, py::handle sum_exp_object,
                       py::handle target_logit_object) {
  TensorView logits("logits", logits_object), labels("labels", labels_object),
      row_max("row_max", row_max_object), sum_exp("sum_exp", sum_exp_object),
      target_logit("target_logit", target_logit_object);
  CrossEntropyArgs args = logits_args(logits, labels, 0, true);
  args.row_max = row_floats(row_max, logits, {&labels});
  args.sum_exp = row_floats(sum_exp, logits, {&row_max, &labels});
  args.target_logit = row_floats(target_logit, logits, {&row_max, &labels, &sum_exp});
  unlocked([&] { kernels().cross_entropy_forward(args); });
}

void bind_loss_backward(py::handle logits_object, py::handle row_max_object,
                        py::handle sum_exp_object, py::handle labels_object, int64_t first_row,
                        py::handle dloss_object, py::handle out_object, float z_loss) {
  TensorView logits("logits", logits_object), row_max("row_max", row_max_object),
      sum_exp("sum_exp", sum_exp_object), labels("labels", labels_object),
      dloss("dloss", dloss_object), out("out", out_object);
  CrossEntropyArgs args = logits_args(logits, labels, first_row, false);
  args.row_max = row_floats(row_max, logits, {});
  args.sum_exp = row_floats(sum_exp, logits, {});
  args.z_loss = z_loss;
  const float* grad = row_floats(dloss, logits, {});
  out.floating().same_shape(logits).contiguous().same_or_disjoint({&logits});
  out.disjoint({&row_max, &sum_exp, &labels, &dloss});
  unlocked([&] { kernels().cross_entropy_backward(args, grad, out.data(), out.dtype()); });
}

const char MAX_DOC[] =
    R"(row_max = largest logit of each row. logits: (rows, v) float32, bfloat16 or float16; row_max: float32 (rows).)";

const char SUM_DOC[] =
    R"(sum_exp = sum of exp(logit - row_max) and target_logit = logits[label] - row_max of each row of this rank's vocabulary.

row_max: over all ranks. labels: int64 (rows), words of the whole vocabulary; column 0 of logits is word first_row. A label of
another rank makes target_logit 0, so that summed over ranks loss = log(sum_exp) - target_logit. A row with a label below 0 is
not counted: its logits are not read, and sum_exp and target_logit are 0.)";

const char FORWARD_DOC[] =
    R"(cross_entropy_max and cross_entropy_sum of a whole vocabulary in one reading of the logits.

loss = log(sum_exp) - target_logit. A row with the label -1 is not counted: its logits are not read, and its three results are 0.
Any other label that is not a column is a ValueError.)";

const char BACKWARD_DOC[] =
    R"(out = (factor exp(logits - row_max) / sum_exp - [column is the label]) dloss, factor = 1 + 2 z_loss z.

z = log(sum_exp) + row_max: the gradient of a loss that has z_loss z^2 added.

row_max, sum_exp: over all ranks; dloss: float32 (rows). out: (rows, v) in any of the three dtypes; may be logits. Its rows with a
label below 0 are zeros. Rows may be handed over in chunks, so that dlogits of one chunk are used up before the next is made.)";

}  // namespace

FM_BIND(cross_entropy) {
  using namespace py::literals;
  module.def("cross_entropy_max", &bind_max, "logits"_a, "row_max"_a, MAX_DOC);
  module.def("cross_entropy_sum", &bind_sum, "logits"_a, "row_max"_a, "labels"_a, "first_row"_a,
             "sum_exp"_a, "target_logit"_a, SUM_DOC);
  module.def("cross_entropy_forward", &bind_loss_forward, "logits"_a, "labels"_a, "row_max"_a,
             "sum_exp"_a, "target_logit"_a, FORWARD_DOC);
  module.def("cross_entropy_backward", &bind_loss_backward, "logits"_a, "row_max"_a, "sum_exp"_a,
             "labels"_a, "first_row"_a, "dloss"_a, "out"_a, "z_loss"_a = 0.0f, BACKWARD_DOC);
}

}  // namespace fm
