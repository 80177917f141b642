// Python functions of embedding.h.
#include "extension/arguments.h"

namespace fm {
namespace {

EmbeddingArgs embedding_args(const TensorView& tokens, const TensorView& table,
                             const TensorView& rows, int64_t first_row,
                             std::optional<int64_t> vocabulary) {
  tokens.dtype({DType::i64}).contiguous();
  table.rank(2).contiguous();
  rows.floating().contiguous();
  const bool fits = rows.rank() >= 1 && rows.size(-1) == table.size(1) &&
                    rows.numel() == tokens.numel() * table.size(1);
  if (!fits)
    rows.fail("a row of " + std::to_string(table.size(1)) + " for each of " +
                  std::to_string(tokens.numel()) + " tokens",
              std::to_string(rows.numel()) + " elements");
  require(first_row >= 0, "first_row", "0 or more", std::to_string(first_row));
  const int64_t* words = tokens.data<int64_t>();
  for (int64_t i = 0; vocabulary && i < tokens.numel(); ++i)
    if (words[i] < 0 || words[i] >= *vocabulary)
      require(false, "tokens", "words from 0 to " + std::to_string(*vocabulary - 1),
              std::to_string(words[i]) + " at " + std::to_string(i));
  return {words, tokens.numel(), first_row, table.size(0), table.size(1)};
}

Call lookup(py::handle tokens_object, py::handle table_object, py::handle out_object,
            int64_t first_row, std::optional<int64_t> vocabulary) {
  TensorView tokens("tokens", tokens_object), table("table", table_object), out("out", out_object);
  const EmbeddingArgs args = embedding_args(tokens, table, out, first_row, vocabulary);
  out.same_dtype(table).disjoint({&tokens, &table});
  return [args, table = table.data(), out = out.data(), dtype = out.dtype()] {
    kernels().embedding(args, table, out, dtype);
  };
}

void lookup_backward(py::handle tokens_object, py::handle dout_object, py::handle dtable_object,
                     int64_t first_row) {
  TensorView tokens("tokens", tokens_object), dout("dout", dout_object),
      dtable("dtable", dtable_object);
  const EmbeddingArgs args = embedding_args(tokens, dtable, dout, first_row, std::nullopt);
  dtable.dtype({DType::f32}).disjoint({&tokens, &dout});
  unlocked(
      [&] { kernels().embedding_backward(args, dout.data(), dout.dtype(), dtable.data<float>()); });
}

void check_positions(const TensorView& x, const TensorView& table) {
  x.floating().rank(3).contiguous();
  table.rank(2).contiguous();
  if (table.size(0) < x.size(0) || table.size(1) != x.size(2))
    table.fail("at least " + std::to_string(x.size(0)) + " rows of " + std::to_string(x.size(2)),
               std::to_string(table.size(0)) + " rows of " + std::to_string(table.size(1)));
}

Call add_position(py::handle x_object, py::handle table_object, py::handle out_object) {
  TensorView x("x", x_object), table("table", table_object), out("out", out_object);
  check_positions(x, table);
  table.same_dtype(x);
  out.same_dtype(x).same_shape(x).contiguous().same_or_disjoint({&x}).disjoint({&table});
  return [dtype = x.dtype(), s = x.size(0), b = x.size(1), cols = x.size(2), x = x.data(),
          table = table.data(),
          out = out.data()] { kernels().add_position(x, table, out, dtype, s, b, cols); };
}

void add_position_backward(py::handle dout_object, py::handle dtable_object) {
  TensorView dout("dout", dout_object), dtable("dtable", dtable_object);
  check_positions(dout, dtable);
  dtable.dtype({DType::f32}).disjoint({&dout});
  unlocked([&] {
    kernels().add_position_backward(dout.data(), dout.dtype(), dtable.data<float>(), dout.size(0),
                                    dout.size(1), dout.size(2));
  });
}

const char EMBEDDING_DOC[] =
    R"(out = table[tokens - first_row], zeros for tokens of other ranks' rows.

tokens: int64, any shape; table: (rows, h); out: (..., h) with a row per token, table's dtype. vocabulary: size of the whole table;
where it is passed, a token outside is a ValueError.)";

}  // namespace

FM_BIND(embedding) {
  using namespace py::literals;
  def_repeatable(module, "embedding", &lookup, "tokens"_a, "table"_a, "out"_a, "first_row"_a = 0,
                 "vocabulary"_a = py::none(), EMBEDDING_DOC);
  module.def("embedding_backward", &lookup_backward, "tokens"_a, "dout"_a, "dtable"_a,
             "first_row"_a = 0,
             "dtable (float32) [tokens - first_row] += dout, the tokens in order; the same bits "
             "for any number of "
             "threads.");
  def_repeatable(module, "add_position", &add_position, "x"_a, "table"_a, "out"_a,
                 "out (s, b, h) = x + table[:s]; x, table and out have one dtype, out may be x.");
  module.def("add_position_backward", &add_position_backward, "dout"_a, "dtable"_a,
             "dtable (float32) [:s] += sum of dout (s, b, h) over b.");
}

}  // namespace fm
