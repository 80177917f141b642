// Python functions of attention.h: attention_forward, attention_backward, the same of a part of a sequence, attention_decode.
#include "extension/arguments.h"

#include <cmath>

namespace fm {
namespace {

// The last arguments of every function of sequences.
struct Options {
  double p;
  uint64_t seed, stream;
  int64_t first_sample, first_head;
  std::optional<int64_t> window;
  py::handle starts;
  std::optional<int64_t> key_size;
  std::optional<double> scale;
};

float score_divisor(std::optional<double> scale, int64_t key_size) {
  require(!scale || (*scale > 0 && std::isfinite(*scale)), "scale", "a number above 0, or None",
          std::to_string(scale.value_or(0)));
  return scale ? static_cast<float>(1 / *scale) : std::sqrt(static_cast<float>(key_size));
}

// Groups of a row of `columns`: a query of each head, a key and a value of each group.
int64_t groups_of(int64_t columns, int64_t heads, int64_t key_size, int64_t value_size) {
  const int64_t left = columns - heads * key_size, groups = left / (key_size + value_size);
  require(groups > 0 && groups * (key_size + value_size) == left && heads % groups == 0, "qkv",
          "heads * key_size + groups * (key_size + value_size) columns with " +
              std::to_string(heads) + " heads (dimension 1 of lse), key_size " +
              std::to_string(key_size) + ", value_size " + std::to_string(value_size) +
              " (from out) and groups that divide the heads",
          std::to_string(columns) + " columns");
  return groups;
}

// Sizes from qkv (queries, b, columns), out (queries, b, heads value_size) and lse (b, heads, queries), of a sequence of s.
AttentionArgs check(const TensorView& qkv, const TensorView& out, const TensorView& lse, int64_t s,
                    const Options& options) {
  qkv.floating().rank(3).contiguous();
  lse.dtype({DType::f32}).rank(3).shape({qkv.size(1), -1, qkv.size(0)}).contiguous().aligned(4);
  out.same_dtype(qkv).rank(3).shape({qkv.size(0), qkv.size(1), -1}).contiguous();
  const int64_t heads = lse.size(1), width = out.size(2);
  require(heads > 0, "lse", "one head or more in dimension 1", "0");
  require(width > 0 && width % (4 * heads) == 0, "out",
          "heads * value_size columns with " + std::to_string(heads) +
              " heads (dimension 1 of lse) and value_size a multiple of 4",
          std::to_string(width) + " columns");
  const int64_t value_size = width / heads, key_size = options.key_size.value_or(value_size);
  require(key_size > 0 && key_size % 4 == 0, "key_size", "a multiple of 4, or None",
          std::to_string(key_size));
  const int64_t groups = groups_of(qkv.size(2), heads, key_size, value_size);
  const int64_t window = options.window.value_or(NO_WINDOW), first_head = options.first_head;
  require(window > 0, "window", "1 or more, or None", std::to_string(window));
  require(options.p >= 0 && options.p < 1, "p", "a probability in [0, 1)",
          std::to_string(options.p));
  require(options.first_sample >= 0, "first_sample", "0 or more",
          std::to_string(options.first_sample));
  require(first_head >= 0, "first_head", "0 or more", std::to_string(first_head));
  require(s < INT64_C(1) << 31 && (first_head + heads) * s <= INT64_C(1) << 32, "first_head",
          "fewer than 2**32 rows (first_head + heads) * s in a sample",
          std::to_string(first_head + heads) + " * " + std::to_string(s));
  return {s,
          qkv.size(1),
          heads,
          groups,
          key_size,
          value_size,
          window,
          score_divisor(options.scale, key_size),
          static_cast<float>(options.p),
          options.seed,
          options.stream,
          options.first_sample,
          first_head,
          document_starts(options.starts, qkv.size(1), s)};
}

void bind_forward(const Options& options, py::handle qkv_object, py::handle out_object,
                  py::handle lse_object) {
  TensorView qkv("qkv", qkv_object), out("out", out_object), lse("lse", lse_object);
  const AttentionArgs args = check(qkv, out, lse, qkv.size(0), options);
  out.disjoint({&qkv});
  lse.disjoint({&qkv, &out});
  if (!qkv.numel()) return;
  unlocked([&] {
    kernels().attention_forward(qkv.data(), out.data(), lse.data<float>(), qkv.dtype(), args);
  });
}

void bind_backward(const Options& options, py::handle qkv_object, py::handle out_object,
                   py::handle lse_object, py::handle dout_object, py::handle dqkv_object) {
  TensorView qkv("qkv", qkv_object), out("out", out_object), lse("lse", lse_object),
      dout("dout", dout_object);
  TensorView dqkv("dqkv", dqkv_object);
  const AttentionArgs args = check(qkv, out, lse, qkv.size(0), options);
  dout.same_dtype(qkv).same_shape(out).contiguous();
  dqkv.same_dtype(qkv).same_shape(qkv).contiguous().disjoint({&qkv, &out, &lse, &dout});
  if (!qkv.numel()) return;
  unlocked([&] {
    kernels().attention_backward(qkv.data(), out.data(), lse.data<float>(), dout.data(),
                                 dqkv.data(), qkv.dtype(), args);
  });
}

// The same for a part of a sequence of s, whose keys and values are kv (keys, b, groups (key_size + value_size)).
AttentionArgs check_part(const TensorView& qkv, const TensorView& kv, const TensorView& out,
                         const TensorView& lse, int64_t s, int64_t first_query, int64_t first_key,
                         const Options& options) {
  AttentionArgs args = check(qkv, out, lse, s, options);
  kv.same_dtype(qkv)
      .shape({-1, args.b, args.groups * (args.key_size + args.value_size)})
      .contiguous();
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

void bind_part_forward(const Options& options, py::handle qkv_object, py::handle kv_object,
                       py::handle out_object, py::handle lse_object, int64_t s, int64_t first_query,
                       int64_t first_key) {
  TensorView qkv("qkv", qkv_object), kv("kv", kv_object), out("out", out_object),
      lse("lse", lse_object);
  const AttentionArgs args = check_part(qkv, kv, out, lse, s, first_query, first_key, options);
  out.disjoint({&qkv, &kv});
  lse.disjoint({&qkv, &kv, &out});
  require(kv.numel() || !qkv.numel(), "kv", "one key or more", "none");
  if (!qkv.numel()) return;
  unlocked([&] {
    kernels().attention_part_forward(qkv.data(), kv.data(), out.data(), lse.data<float>(),
                                     qkv.dtype(), args);
  });
}

void bind_part_backward(const Options& options, py::handle qkv_object, py::handle kv_object,
                        py::handle out_object, py::handle lse_object, py::handle dout_object,
                        py::handle dqkv_object, py::handle dkv_object, int64_t s,
                        int64_t first_query, int64_t first_key) {
  TensorView qkv("qkv", qkv_object), kv("kv", kv_object), out("out", out_object),
      lse("lse", lse_object), dout("dout", dout_object);
  TensorView dqkv("dqkv", dqkv_object), dkv("dkv", dkv_object);
  const AttentionArgs args = check_part(qkv, kv, out, lse, s, first_query, first_key, options);
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

// Sizes from qkv (rows, columns), keys (samples, groups, slots, key_size) and values (.., value_size); places and positions
// inside them.
DecodeArgs check_decode(const TensorView& qkv, const TensorView& keys, const TensorView& values,
                        const TensorView& samples, const TensorView& positions,
                        std::optional<double> scale) {
  qkv.floating().rank(2).contiguous();
  keys.same_dtype(qkv).rank(4).contiguous();
  const int64_t rows = qkv.size(0), groups = keys.size(1), slots = keys.size(2),
                key_size = keys.size(3);
  for (const TensorView* numbers : {&samples, &positions}) {
    numbers->dtype({DType::i64}).shape({rows}).contiguous().aligned(8);
  }
  require(groups > 0 && slots > 0 && key_size > 0 && key_size % 4 == 0, "keys",
          "(samples, groups, slots, key_size), key_size a multiple of 4",
          std::to_string(groups) + " groups, " + std::to_string(slots) + " slots, key_size " +
              std::to_string(key_size));
  values.same_dtype(qkv).rank(4).shape({keys.size(0), groups, slots, -1});
  const int64_t value_size = values.size(3);
  require(value_size > 0 && value_size % 4 == 0, "values",
          "(samples, groups, slots, value_size), value_size a multiple of 4",
          "value_size " + std::to_string(value_size));
  const bool shared = values.data() == keys.data() && value_size < key_size;
  if (shared) {
    for (int dim = 0; dim < 4; ++dim)
      require(values.stride(dim) == keys.stride(dim), "values", "the strides of keys",
              std::to_string(values.stride(dim)) + " in dimension " + std::to_string(dim));
  } else {
    values.contiguous().disjoint({&keys, &qkv});
  }
  const int64_t each = key_size + (shared ? 0 : value_size), left = qkv.size(1) - groups * each;
  const int64_t heads = left / key_size;
  require(heads > 0 && heads % groups == 0 && left % key_size == 0, "qkv",
          "heads * key_size + groups * " + std::to_string(each) + " columns with key_size " +
              std::to_string(key_size) + " and " + std::to_string(groups) +
              " groups (of keys) that divide the heads",
          std::to_string(qkv.size(1)) + " columns");
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t sample = samples.data<int64_t>()[row], position = positions.data<int64_t>()[row];
    require(sample >= 0 && sample < keys.size(0), "samples",
            "numbers below " + std::to_string(keys.size(0)), std::to_string(sample));
    require(position >= 0, "positions", "0 or more", std::to_string(position));
  }
  return {rows,
          heads,
          groups,
          key_size,
          value_size,
          slots,
          shared,
          score_divisor(scale, key_size),
          samples.data<int64_t>(),
          positions.data<int64_t>()};
}

Call bind_decode(py::handle qkv_object, py::handle keys_object, py::handle values_object,
                 py::handle samples_object, py::handle positions_object, py::handle out_object,
                 std::optional<double> scale) {
  TensorView qkv("qkv", qkv_object), keys("keys", keys_object), values("values", values_object),
      out("out", out_object);
  TensorView samples("samples", samples_object), positions("positions", positions_object);
  const DecodeArgs args = check_decode(qkv, keys, values, samples, positions, scale);
  keys.disjoint({&qkv});
  out.same_dtype(qkv).shape({args.rows, args.heads * args.value_size}).contiguous();
  out.disjoint({&qkv, &keys, &values, &samples, &positions});
  if (!qkv.numel()) return [] {};
  return [args, dtype = qkv.dtype(), qkv = qkv.data(), keys = keys.data(), values = values.data(),
          out = out.data()] { kernels().attention_decode(qkv, keys, values, out, dtype, args); };
}

// Binds module.name: operands, then the arguments of Options.
template <class... Operands, class... Names>
void def_attention(py::module_& module, const char* name,
                   void (*function)(const Options&, Operands...), const char* doc,
                   const Names&... names) {
  using namespace py::literals;
  module.def(
      name,
      [function](Operands... operands, double p, uint64_t seed, uint64_t stream,
                 int64_t first_sample, int64_t first_head, std::optional<int64_t> window,
                 py::handle starts, std::optional<int64_t> key_size, std::optional<double> scale) {
        function({p, seed, stream, first_sample, first_head, window, starts, key_size, scale},
                 operands...);
      },
      names..., "p"_a = 0.0, "seed"_a = 0, "stream"_a = 0, "first_sample"_a = 0, "first_head"_a = 0,
      "window"_a = py::none(), "starts"_a = py::none(), "key_size"_a = py::none(),
      "scale"_a = py::none(), doc);
}

}  // namespace

FM_BIND(attention) {
  using namespace py::literals;
  def_repeatable(
      module, "attention_decode", &bind_decode, "qkv"_a, "keys"_a, "values"_a, "samples"_a,
      "positions"_a, "out"_a, "scale"_a = py::none(),
      "Attention of one new token of each of `rows` samples, whose key and value are kept.\n"
      "qkv: float32, bfloat16 or float16 (rows, heads * key_size + groups * (key_size + "
      "value_size)), as in attention_forward.\n"
      "out: (rows, heads * value_size).\n"
      "keys: (all samples, groups, slots, key_size), values: (.., value_size), position p in slot "
      "p mod slots: no more than\n"
      "the last `slots` positions are attended to. values may be keys[..., :value_size]: then a "
      "value is the beginning of its\n"
      "key, and qkv has no values: (rows, (heads + groups) key_size). samples, positions: int64 "
      "(rows), each row's place\n"
      "among all samples, no two of them the same, and its position in its own. Sums are float32. "
      "scale: see attention_forward.");
  def_attention(
      module, "attention_forward", &bind_forward,
      "out = dropout(softmax(scale Q K^T, causal), p) V for every head, and lse = "
      "log(sum(exp(scores))) for the backward.\n"
      "qkv: float32, bfloat16 or float16 (s, b, heads * key_size + groups * (key_size + "
      "value_size)), for each group its\n"
      "heads / groups queries, its key and its value; there are as many groups as the width says.\n"
      "out: (s, b, heads * value_size). lse: float32 (b, heads, s). All contiguous. Sums are "
      "float32.\n"
      "window: query i sees the keys i - window < j <= i; None: all keys j <= i.\n"
      "starts: int32 (b, s), where the document of each position begins: query i sees no key "
      "before starts[i], which is\n"
      "i or starts[i - 1]. None: each sample is one document.\n"
      "key_size: of queries and keys; None: value_size. Both are multiples of 4. scale: None: "
      "1 / sqrt(key_size).\n"
      "Dropout is that of dropout() on probabilities (b, heads, s, s) with sample_dim=0, "
      "row0=first_head * s.\n"
      "A NaN or infinity in a value reaches the queries that see it and those within a tile of "
      "them.",
      "qkv"_a, "out"_a, "lse"_a);
  def_attention(
      module, "attention_backward", &bind_backward,
      "Writes dqkv, the gradient with respect to qkv, from dout and what attention_forward was "
      "given and gave. Shapes as\n"
      "there; dqkv as qkv, dout as out. The arguments from p on must be those of the forward.",
      "qkv"_a, "out"_a, "lse"_a, "dout"_a, "dqkv"_a);
  def_attention(
      module, "attention_part_forward", &bind_part_forward,
      "attention_forward of a part of a sequence of s positions: the queries from position "
      "first_query on, and the keys from\n"
      "first_key on. qkv: (queries, b, ..) as there, of which only queries are read. kv: (keys, b, "
      "groups * (key_size +\n"
      "value_size)), each group's key and value. out: (queries, b, heads * value_size). lse: (b, "
      "heads, queries), -inf for a\n"
      "query that sees none of the keys, whose out is 0. The rest as there; dropout and starts (b, "
      "s) are those of the\n"
      "whole sequence.",
      "qkv"_a, "kv"_a, "out"_a, "lse"_a, "s"_a, "first_query"_a, "first_key"_a);
  def_attention(
      module, "attention_part_backward", &bind_part_backward,
      "Adds the gradients of a part to dqkv (those of the queries) and dkv, float32 with "
      "the shapes of qkv and kv. out and lse\n"
      "are those of the queries' attention to all keys that they see, not to these alone.",
      "qkv"_a, "kv"_a, "out"_a, "lse"_a, "dout"_a, "dqkv"_a, "dkv"_a, "s"_a, "first_query"_a,
      "first_key"_a);
}

}  // namespace fm
