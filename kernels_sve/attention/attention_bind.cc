// Python functions of attention.h: attention_forward, attention_backward, and the same of a part of a sequence.
#include "extension/arguments.h"

namespace fm {
namespace {

struct Dropout {
  double p;
  uint64_t seed, stream;
  int64_t first_sample, first_head;
};

// Groups of qkv (s, b, (heads + 2 groups) d), from its width.
int64_t groups_of(const TensorView& qkv, int64_t heads, int64_t d) {
  const int64_t width = qkv.size(2), groups = (width / d - heads) / 2;
  require(groups > 0 && (heads + 2 * groups) * d == width && heads % groups == 0, "qkv",
          "(heads + 2 groups) * d columns with " + std::to_string(heads) +
              " heads (dimension 1 of lse), d " + std::to_string(d) +
              " (from out) and groups that divide the heads",
          std::to_string(width) + " columns");
  return groups;
}

// Sizes from qkv (queries, b, (heads + 2 groups) d), out (queries, b, heads d) and lse (b, heads, queries), of a sequence of s.
AttentionArgs check(const TensorView& qkv, const TensorView& out, const TensorView& lse, int64_t s,
                    const Dropout& dropout, std::optional<int64_t> window,
                    py::handle starts_object) {
  qkv.floating().rank(3).contiguous();
  lse.dtype({DType::f32}).rank(3).shape({qkv.size(1), -1, qkv.size(0)}).contiguous().aligned(4);
  out.same_dtype(qkv).rank(3).shape({qkv.size(0), qkv.size(1), -1}).contiguous();
  const int64_t heads = lse.size(1), width = out.size(2);
  require(heads > 0, "lse", "one head or more in dimension 1", "0");
  require(width > 0 && width % (4 * heads) == 0, "out",
          "heads * d columns with " + std::to_string(heads) +
              " heads (dimension 1 of lse) and d a multiple of 4",
          std::to_string(width) + " columns");
  const int64_t groups = groups_of(qkv, heads, width / heads);
  require(window.value_or(1) > 0, "window", "1 or more, or None",
          std::to_string(window.value_or(1)));
  require(dropout.p >= 0 && dropout.p < 1, "p", "a probability in [0, 1)",
          std::to_string(dropout.p));
  require(dropout.first_sample >= 0, "first_sample", "0 or more",
          std::to_string(dropout.first_sample));
  require(dropout.first_head >= 0, "first_head", "0 or more", std::to_string(dropout.first_head));
  require(s < INT64_C(1) << 31 && (dropout.first_head + heads) * s <= INT64_C(1) << 32,
          "first_head", "fewer than 2**32 rows (first_head + heads) * s in a sample",
          std::to_string(dropout.first_head + heads) + " * " + std::to_string(s));
  return {s,
          qkv.size(1),
          heads,
          groups,
          width / heads,
          window.value_or(NO_WINDOW),
          static_cast<float>(dropout.p),
          dropout.seed,
          dropout.stream,
          dropout.first_sample,
          dropout.first_head,
          document_starts(starts_object, qkv.size(1), s)};
}

void bind_forward(py::handle qkv_object, py::handle out_object, py::handle lse_object, double p,
                  uint64_t seed, uint64_t stream, int64_t first_sample, int64_t first_head,
                  std::optional<int64_t> window, py::handle starts) {
  TensorView qkv("qkv", qkv_object), out("out", out_object), lse("lse", lse_object);
  const AttentionArgs args = check(qkv, out, lse, qkv.size(0),
                                   {p, seed, stream, first_sample, first_head}, window, starts);
  out.disjoint({&qkv});
  lse.disjoint({&qkv, &out});
  if (!qkv.numel()) return;
  unlocked([&] {
    kernels().attention_forward(qkv.data(), out.data(), lse.data<float>(), qkv.dtype(), args);
  });
}

// The same for a part, whose keys and values are kv (keys, b, 2 groups d).
AttentionArgs check_part(const TensorView& qkv, const TensorView& kv, const TensorView& out,
                         const TensorView& lse, int64_t s, int64_t first_query, int64_t first_key,
                         const Dropout& dropout, std::optional<int64_t> window,
                         py::handle starts_object) {
  AttentionArgs args = check(qkv, out, lse, s, dropout, window, starts_object);
  kv.same_dtype(qkv).shape({-1, args.b, 2 * args.groups * args.d}).contiguous();
  const auto positions = [&](const char* name, int64_t first, int64_t count) {
    require(first >= 0 && first + count <= s, name,
            "a position from which all rows are below s " + std::to_string(s),
            std::to_string(first) + " and " + std::to_string(count) + " rows");
    return Positions{first, first + count};
  };
  args.queries = positions("first_query", first_query, qkv.size(0));
  args.keys = positions("first_key", first_key, kv.size(0));
  return args;
}

void bind_part_forward(py::handle qkv_object, py::handle kv_object, py::handle out_object,
                       py::handle lse_object, int64_t s, int64_t first_query, int64_t first_key,
                       double p, uint64_t seed, uint64_t stream, int64_t first_sample,
                       int64_t first_head, std::optional<int64_t> window, py::handle starts) {
  TensorView qkv("qkv", qkv_object), kv("kv", kv_object), out("out", out_object),
      lse("lse", lse_object);
  const AttentionArgs args =
      check_part(qkv, kv, out, lse, s, first_query, first_key,
                 {p, seed, stream, first_sample, first_head}, window, starts);
  out.disjoint({&qkv, &kv});
  lse.disjoint({&qkv, &kv, &out});
  require(kv.numel() || !qkv.numel(), "kv", "one key or more", "none");
  if (!qkv.numel()) return;
  unlocked([&] {
    kernels().attention_part_forward(qkv.data(), kv.data(), out.data(), lse.data<float>(),
                                     qkv.dtype(), args);
  });
}

void bind_part_backward(py::handle qkv_object, py::handle kv_object, py::handle out_object,
                        py::handle lse_object, py::handle dout_object, py::handle dqkv_object,
                        py::handle dkv_object, int64_t s, int64_t first_query, int64_t first_key,
                        double p, uint64_t seed, uint64_t stream, int64_t first_sample,
                        int64_t first_head, std::optional<int64_t> window, py::handle starts) {
  TensorView qkv("qkv", qkv_object), kv("kv", kv_object), out("out", out_object),
      lse("lse", lse_object), dout("dout", dout_object);
  TensorView dqkv("dqkv", dqkv_object), dkv("dkv", dkv_object);
  const AttentionArgs args =
      check_part(qkv, kv, out, lse, s, first_query, first_key,
                 {p, seed, stream, first_sample, first_head}, window, starts);
  dout.same_dtype(qkv).same_shape(out).contiguous();
  dqkv.dtype({DType::f32}).same_shape(qkv).contiguous().disjoint({&qkv, &kv, &out, &lse, &dout});
  dkv.dtype({DType::f32})
      .same_shape(kv)
      .contiguous()
      .disjoint({&qkv, &kv, &out, &lse, &dout, &dqkv});
  if (!qkv.numel() || !kv.numel()) return;
  unlocked([&] {
    kernels().attention_part_backward(qkv.data(), kv.data(), out.data(), lse.data<float>(),
                                      dout.data(), dqkv.data(), dkv.data(), qkv.dtype(), args);
  });
}

void bind_backward(py::handle qkv_object, py::handle out_object, py::handle lse_object,
                   py::handle dout_object, py::handle dqkv_object, double p, uint64_t seed,
                   uint64_t stream, int64_t first_sample, int64_t first_head,
                   std::optional<int64_t> window, py::handle starts) {
  TensorView qkv("qkv", qkv_object), out("out", out_object), lse("lse", lse_object),
      dout("dout", dout_object);
  TensorView dqkv("dqkv", dqkv_object);
  const AttentionArgs args = check(qkv, out, lse, qkv.size(0),
                                   {p, seed, stream, first_sample, first_head}, window, starts);
  dout.same_dtype(qkv).same_shape(out).contiguous();
  dqkv.same_dtype(qkv).same_shape(qkv).contiguous().disjoint({&qkv, &out, &lse, &dout});
  if (!qkv.numel()) return;
  unlocked([&] {
    kernels().attention_backward(qkv.data(), out.data(), lse.data<float>(), dout.data(),
                                 dqkv.data(), qkv.dtype(), args);
  });
}

// Sizes from qkv (rows, (heads + 2 groups) d) and keys (samples, groups, slots, d); places and positions inside them.
DecodeArgs check_decode(const TensorView& qkv, const TensorView& keys, const TensorView& samples,
                        const TensorView& positions) {
  qkv.floating().rank(2).contiguous();
  keys.same_dtype(qkv).rank(4).contiguous();
  const int64_t rows = qkv.size(0), groups = keys.size(1), slots = keys.size(2), d = keys.size(3);
  for (const TensorView* numbers : {&samples, &positions}) {
    numbers->dtype({DType::i64}).shape({rows}).contiguous().aligned(8);
  }
  require(groups > 0 && slots > 0 && d > 0 && d % 4 == 0, "keys",
          "(samples, groups, slots, d), d a multiple of 4",
          std::to_string(groups) + " groups, " + std::to_string(slots) + " slots, d " +
              std::to_string(d));
  const int64_t heads = qkv.size(1) / d - 2 * groups;
  require(heads > 0 && heads % groups == 0 && qkv.size(1) % d == 0, "qkv",
          "(heads + 2 groups) * d columns with d " + std::to_string(d) + " and " +
              std::to_string(groups) + " groups (of keys) that divide the heads",
          std::to_string(qkv.size(1)) + " columns");
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t sample = samples.data<int64_t>()[row], position = positions.data<int64_t>()[row];
    require(sample >= 0 && sample < keys.size(0), "samples",
            "numbers below " + std::to_string(keys.size(0)), std::to_string(sample));
    require(position >= 0, "positions", "0 or more", std::to_string(position));
  }
  return {rows, heads, groups, d, slots, samples.data<int64_t>(), positions.data<int64_t>()};
}

Call bind_decode(py::handle qkv_object, py::handle keys_object, py::handle values_object,
                 py::handle samples_object, py::handle positions_object, py::handle out_object) {
  TensorView qkv("qkv", qkv_object), keys("keys", keys_object), values("values", values_object),
      out("out", out_object);
  TensorView samples("samples", samples_object), positions("positions", positions_object);
  const DecodeArgs args = check_decode(qkv, keys, samples, positions);
  values.same_dtype(qkv).same_shape(keys).contiguous().disjoint({&keys, &qkv});
  keys.disjoint({&qkv});
  out.same_dtype(qkv).shape({args.rows, args.heads * args.d}).contiguous();
  out.disjoint({&qkv, &keys, &values, &samples, &positions});
  if (!qkv.numel()) return [] {};
  return [args, dtype = qkv.dtype(), qkv = qkv.data(), keys = keys.data(), values = values.data(),
          out = out.data()] { kernels().attention_decode(qkv, keys, values, out, dtype, args); };
}

}  // namespace

FM_BIND(attention) {
  using namespace py::literals;
  def_repeatable(
      module, "attention_decode", &bind_decode, "qkv"_a, "keys"_a, "values"_a, "samples"_a,
      "positions"_a, "out"_a,
      "Attention of one new token of each of `rows` samples, whose key and value are kept.\n"
      "qkv: float32, bfloat16 or float16 (rows, (heads + 2 groups) d), as in attention_forward. "
      "out: (rows, heads * d).\n"
      "keys, values: (all samples, groups, slots, d), position p in slot p mod slots: no more than "
      "the last "
      "`slots`\n"
      "positions are attended to. samples, positions: int64 (rows), each row's place among all "
      "samples, no two "
      "of them\n"
      "the same, and its position in its own. Sums are float32.");
  module.def(
      "attention_forward", &bind_forward, "qkv"_a, "out"_a, "lse"_a, "p"_a = 0.0, "seed"_a = 0,
      "stream"_a = 0, "first_sample"_a = 0, "first_head"_a = 0, "window"_a = py::none(),
      "starts"_a = py::none(),
      "out = dropout(softmax(Q K^T / sqrt(d), causal), p) V for every head, and lse = "
      "log(sum(exp(scores))) for "
      "the backward.\n"
      "qkv: float32, bfloat16 or float16 (s, b, (heads + 2 groups) d), for each group its heads / "
      "groups queries,\n"
      "its key and its value, d a multiple of 4; there are as many groups as the width says.\n"
      "out: (s, b, heads * d). lse: float32 (b, heads, s). All contiguous. Sums are float32.\n"
      "window: query i sees the keys i - window < j <= i; None: all keys j <= i.\n"
      "starts: int32 (b, s), where the document of each position begins: query i sees no key "
      "before starts[i]. It never\n"
      "falls within a sample. None: each sample is one document.\n"
      "Dropout is that of dropout() on probabilities (b, heads, s, s) with sample_dim=0, "
      "row0=first_head * s.\n"
      "A NaN or infinity in a value reaches the queries that see it and those within a tile of "
      "them.");
  module.def(
      "attention_backward", &bind_backward, "qkv"_a, "out"_a, "lse"_a, "dout"_a, "dqkv"_a,
      "p"_a = 0.0, "seed"_a = 0, "stream"_a = 0, "first_sample"_a = 0, "first_head"_a = 0,
      "window"_a = py::none(), "starts"_a = py::none(),
      "Writes dqkv, the gradient with respect to qkv, from dout and what attention_forward was "
      "given and gave. "
      "Shapes as\n"
      "there; dqkv as qkv, dout as out. The arguments from p on must be those of the forward.");
  module.def("attention_part_forward", &bind_part_forward, "qkv"_a, "kv"_a, "out"_a, "lse"_a, "s"_a,
             "first_query"_a, "first_key"_a, "p"_a = 0.0, "seed"_a = 0, "stream"_a = 0,
             "first_sample"_a = 0, "first_head"_a = 0, "window"_a = py::none(),
             "starts"_a = py::none(),
             "attention_forward of a part of a sequence of s positions: the queries from position "
             "first_query on, and the keys from\n"
             "first_key on. qkv: (queries, b, (heads + 2 groups) d), of which only queries are "
             "read. kv: (keys, b, 2 groups d), each\n"
             "group's key and value. out: (queries, b, heads * d). lse: (b, heads, queries), -inf "
             "for a query that sees none of the\n"
             "keys, whose out is 0. The rest as there; dropout and starts (b, s) are those of the "
             "whole sequence.");
  module.def("attention_part_backward", &bind_part_backward, "qkv"_a, "kv"_a, "out"_a, "lse"_a,
             "dout"_a, "dqkv"_a, "dkv"_a, "s"_a, "first_query"_a, "first_key"_a, "p"_a = 0.0,
             "seed"_a = 0, "stream"_a = 0, "first_sample"_a = 0, "first_head"_a = 0,
             "window"_a = py::none(), "starts"_a = py::none(),
             "Adds the gradients of a part to dqkv (those of the queries) and dkv, float32 with "
             "the shapes of qkv and kv. out and lse\n"
             "are those of the queries' attention to all keys that they see, not to these alone.");
}

}  // namespace fm
