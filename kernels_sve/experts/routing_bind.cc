// Python functions of routing.h.
#include "extension/arguments.h"

namespace fm {
namespace {

Scores scores_of(const std::string& name) {
  const std::pair<const char*, Scores> all[] = {{"softmax", Scores::softmax},
                                                {"softmax_of_chosen", Scores::softmax_of_chosen},
                                                {"sigmoid", Scores::sigmoid}};
  for (const auto& [known, scores] : all)
    if (name == known) return scores;
  throw py::value_error("kind: expected one of softmax, softmax_of_chosen, sigmoid, got " + name);
}

void check_numbers(const TensorView& x, int64_t limit) {
  x.dtype({DType::i64}).contiguous();
  const int64_t* numbers = x.data<int64_t>();
  for (int64_t i = 0; i < x.numel(); ++i) {
    if (numbers[i] >= 0 && numbers[i] < limit) continue;  // without making a message
    x.fail("numbers from 0 to " + std::to_string(limit - 1),
           std::to_string(numbers[i]) + " at " + std::to_string(i));
  }
}

void route_tokens(py::handle logits_object, py::handle bias_object, py::handle scores_object,
                  py::handle chosen_object, const std::string& kind, float scaling, int64_t groups,
                  int64_t group_topk, float normalizer) {
  TensorView logits("logits", logits_object), scores("scores", scores_object),
      chosen("chosen", chosen_object);
  const std::optional<TensorView> bias = optional_view("bias", bias_object);
  logits.dtype({DType::f32}).rank(2).contiguous();
  scores.dtype({DType::f32}).rank(2).shape({logits.size(0), -1}).contiguous().disjoint({&logits});
  chosen.dtype({DType::i64}).same_shape(scores).contiguous().disjoint({&logits, &scores});
  const int64_t experts = logits.size(1), k = scores.size(1);
  require(k >= 1 && k <= experts, "scores", "1 to " + std::to_string(experts) + " columns",
          std::to_string(k));
  require(experts < 1 << 24, "logits", "less than 2^24 columns", std::to_string(experts));
  if (bias) bias->dtype({DType::f32}).shape({experts}).contiguous();
  const RouteArgs args{logits.data<float>(),
                       bias ? bias->data<float>() : nullptr,
                       logits.size(0),
                       experts,
                       k,
                       groups,
                       group_topk,
                       scores_of(kind),
                       scaling,
                       normalizer};
  require(!bias || args.scores == Scores::sigmoid, "bias", "none but of sigmoid", "one of " + kind);
  const bool fits = groups >= 0 &&
                    (!groups || (experts % groups == 0 && group_topk >= 1 && group_topk <= groups &&
                                 k % group_topk == 0 && k / group_topk <= experts / groups));
  require(fits, "groups",
          "a divisor of " + std::to_string(experts) + " experts, whose best " +
              std::to_string(group_topk) + " have " + std::to_string(k) + " in equal parts",
          std::to_string(groups));
  unlocked([&] { kernels().route(args, scores.data<float>(), chosen.data<int64_t>()); });
}

void route_tokens_backward(py::handle dscores_object, py::handle kept_object,
                           py::handle chosen_object, py::handle dlogits_object,
                           const std::string& kind, float scaling, float normalizer) {
  TensorView dscores("dscores", dscores_object), kept("kept", kept_object),
      chosen("chosen", chosen_object), dlogits("dlogits", dlogits_object);
  const Scores scores = scores_of(kind);
  dscores.dtype({DType::f32}).rank(2).contiguous();
  dlogits.dtype({DType::f32})
      .rank(2)
      .shape({dscores.size(0), -1})
      .contiguous()
      .disjoint({&dscores, &kept, &chosen});
  kept.dtype({DType::f32})
      .same_shape(scores == Scores::softmax_of_chosen ? dscores : dlogits)
      .contiguous();
  chosen.same_shape(dscores);
  check_numbers(chosen, dlogits.size(1));
  require(scaling != 0, "scaling", "another number", "0");
  const int64_t k = dscores.size(1);
  require(k <= dlogits.size(1), "dscores",
          "at most " + std::to_string(dlogits.size(1)) + " columns", std::to_string(k));
  const RouteArgs args{nullptr, nullptr, dscores.size(0), dlogits.size(1), k,
                       0,       0,       scores,          scaling,         normalizer};
  unlocked([&] {
    kernels().route_backward(args, dscores.data<float>(), kept.data<float>(),
                             chosen.data<int64_t>(), dlogits.data<float>());
  });
}

void sort_chosen(py::handle chosen_object, py::handle counts_object, py::handle pairs_object,
                 py::handle places_object) {
  TensorView chosen("chosen", chosen_object), counts("counts", counts_object),
      pairs("pairs", pairs_object), places("places", places_object);
  counts.dtype({DType::i64}).rank(1).contiguous();
  check_numbers(chosen, counts.size(0) + 1);
  pairs.dtype({DType::i64}).shape({chosen.numel()}).contiguous();
  places.dtype({DType::i64}).same_shape(chosen).contiguous();
  counts.disjoint({&chosen, &pairs, &places});
  places.disjoint({&chosen, &pairs});
  pairs.disjoint({&chosen});
  unlocked([&] {
    kernels().sort_pairs(chosen.data<int64_t>(), chosen.numel(), counts.size(0),
                         counts.data<int64_t>(), pairs.data<int64_t>(), places.data<int64_t>());
  });
}

void check_rows(const TensorView& x, const TensorView& numbers, const TensorView& out) {
  x.floating().rank(2).contiguous();
  out.same_dtype(x).shape({-1, x.size(1)}).contiguous().disjoint({&x, &numbers});
}

void permute_rows(py::handle x_object, py::handle pairs_object, py::handle out_object, int64_t k) {
  TensorView x("x", x_object), pairs("pairs", pairs_object), out("out", out_object);
  check_rows(x, pairs, out);
  require(k >= 1, "k", "1 or more", std::to_string(k));
  pairs.shape({out.size(0)});
  check_numbers(pairs, x.size(0) * k);
  const PermuteArgs args{x.size(0), out.size(0), k, x.size(1), x.dtype()};
  unlocked([&] { kernels().permute(args, pairs.data<int64_t>(), x.data(), out.data()); });
}

void unpermute_rows(py::handle x_object, py::handle places_object, py::handle out_object) {
  TensorView x("x", x_object), places("places", places_object), out("out", out_object);
  check_rows(x, places, out);
  places.rank(2).shape({out.size(0), -1});
  check_numbers(places, x.size(0) + 1);
  const PermuteArgs args{out.size(0), x.size(0), places.size(1), x.size(1), x.dtype()};
  unlocked([&] { kernels().unpermute(args, places.data<int64_t>(), x.data(), out.data()); });
}

const char ROUTE_DOC[] =
    R"(Choose k experts of each token by logits (rows, experts): scores and chosen are (rows, k), the best first.

kind: "softmax" over all experts, "softmax_of_chosen", or "sigmoid", which of several experts is divided by its sum + normalizer.
bias: (experts), added to sigmoids for the choice, or None. groups: of neighbouring experts, the group_topk best of which are chosen
from; a group counts as the sum of its best k / group_topk. 0: none. Without bias and groups the choice is by the logits. Of equal
numbers the first comes first, and NaN counts as infinity. scaling: what the scores are multiplied by. chosen is int64, all others
float32.)";

const char ROUTE_BACKWARD_DOC[] =
    R"(dlogits (rows, experts) = gradient of route for the gradient dscores (rows, k) of its scores.

kept: the logits (rows, experts), or the scores (rows, k) where kind is "softmax_of_chosen". The others are those of route.)";

const char SORT_PAIRS_DOC[] =
    R"(Put pairs of a token and one of its k experts in the order of the experts, those of an expert ascending.

chosen: (rows, k) experts, or len(counts) of a pair that is dropped. counts: pairs of each expert. pairs: (rows k) numbers row * k +
place in this order; what follows the sum of counts is not written. places: (rows, k), of each pair in the order, or the sum of counts.)";

}  // namespace

FM_BIND(routing) {
  using namespace py::literals;
  module.def("route", &route_tokens, "logits"_a, "bias"_a, "scores"_a, "chosen"_a,
             "kind"_a = "softmax_of_chosen", "scaling"_a = 1.0f, "groups"_a = 0, "group_topk"_a = 0,
             "normalizer"_a = 1e-20f, ROUTE_DOC);
  module.def("route_backward", &route_tokens_backward, "dscores"_a, "kept"_a, "chosen"_a,
             "dlogits"_a, "kind"_a = "softmax_of_chosen", "scaling"_a = 1.0f,
             "normalizer"_a = 1e-20f, ROUTE_BACKWARD_DOC);
  module.def("sort_pairs", &sort_chosen, "chosen"_a, "counts"_a, "pairs"_a, "places"_a,
             SORT_PAIRS_DOC);
  module.def("permute", &permute_rows, "x"_a, "pairs"_a, "out"_a, "k"_a,
             "out (n, cols) = the row of x (rows, cols) of each pair's token. pairs: int64 numbers "
             "row * k + place.");
  module.def("unpermute", &unpermute_rows, "x"_a, "places"_a, "out"_a,
             "out (rows, cols) = the sum over k of rows places[row] of x (n, cols), rounded once; "
             "a place of n adds nothing.");
}

}  // namespace fm
