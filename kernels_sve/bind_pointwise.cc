// Python functions of pointwise.h and pointwise_embedding.h.
#include "bind_rowwise.h"

namespace fm {
namespace {

void bind_gelu(py::handle x_object, py::handle bias_object, py::handle y_object) {
  TensorView x("x", x_object), y("y", y_object);
  const auto bias = optional_view("bias", bias_object);
  x.floating().rank(1, 8).contiguous();
  y.same_dtype(x).same_shape(x).contiguous().same_or_disjoint({&x});
  if (bias) {
    bias->same_dtype(x).shape({x.size(-1)}).contiguous();
    y.disjoint({&*bias});
  }
  unlocked(
      [&] { kernels().gelu(x.data(), bias ? bias->data() : nullptr, y.data(), x.dtype(), rows_of(x), x.size(-1)); });
}

void bind_gelu_backward(py::handle dy_object, py::handle x_object, py::handle bias_object, py::handle dx_object,
                        py::handle dbias_object) {
  TensorView dy("dy", dy_object), x("x", x_object), dx("dx", dx_object);
  const auto bias = optional_view("bias", bias_object), dbias = optional_view("dbias", dbias_object);
  x.floating().rank(1, 8).contiguous();
  dy.same_dtype(x).same_shape(x).contiguous();
  dx.same_dtype(x).same_shape(x).contiguous().same_or_disjoint({&dy, &x});
  require(bias.has_value() == dbias.has_value(), "dbias", "a tensor with bias, None without",
          dbias ? "a tensor" : "None");
  if (bias) {
    bias->same_dtype(x).shape({x.size(-1)}).contiguous();
    dx.disjoint({&*bias});
    dbias->dtype({DType::f32}).shape({x.size(-1)}).contiguous().disjoint({&dy, &x, &dx, &*bias});
  }
  unlocked([&] {
    kernels().gelu_backward(dy.data(), x.data(), bias ? bias->data() : nullptr, dx.data(),
                            dbias ? dbias->data<float>() : nullptr, x.dtype(), rows_of(x), x.size(-1));
  });
}

void bind_column_sum(py::handle x_object, py::handle sum_object) {
  TensorView x("x", x_object), sum("sum", sum_object);
  x.floating().rank(1, 8).contiguous();
  sum.dtype({DType::f32}).shape({x.size(-1)}).contiguous().disjoint({&x});
  unlocked([&] { kernels().column_sum(x.data(), x.dtype(), sum.data<float>(), rows_of(x), x.size(-1)); });
}

void bind_add(py::handle x_object, py::handle y_object, py::handle out_object) {
  TensorView x("x", x_object), y("y", y_object), out("out", out_object);
  x.floating().contiguous();
  y.same_dtype(x).same_shape(x).contiguous();
  out.same_dtype(x).same_shape(x).contiguous().same_or_disjoint({&x, &y});
  unlocked([&] { kernels().add(x.data(), y.data(), out.data(), x.dtype(), x.numel()); });
}

void bind_axpy(double alpha, py::handle x_object, py::handle y_object) {
  TensorView x("x", x_object), y("y", y_object);
  x.floating().contiguous();
  y.floating().same_shape(x).contiguous().same_or_disjoint({&x});
  unlocked([&] { kernels().axpy(static_cast<float>(alpha), x.data(), x.dtype(), y.data(), y.dtype(), x.numel()); });
}

void bind_sum_rows(py::handle x_object, py::handle out_object, double scale) {
  TensorView x("x", x_object), out("out", out_object);
  x.floating().rank(2).last_contiguous();
  out.floating().shape({x.size(1)}).contiguous().disjoint({&x});
  unlocked([&] {
    kernels().sum_rows(x.data(), x.dtype(), x.size(0), x.stride(0), out.data(), out.dtype(), x.size(1),
                       static_cast<float>(scale));
  });
}

EmbeddingArgs embedding_args(const TensorView& tokens, const TensorView& table, const TensorView& rows,
                             int64_t first_row, std::optional<int64_t> vocabulary) {
  tokens.dtype({DType::i64}).contiguous();
  table.rank(2).contiguous();
  rows.floating().contiguous();
  const bool fits =
      rows.rank() >= 1 && rows.size(-1) == table.size(1) && rows.numel() == tokens.numel() * table.size(1);
  if (!fits)
    rows.fail(
        "a row of " + std::to_string(table.size(1)) + " for each of " + std::to_string(tokens.numel()) + " tokens",
        std::to_string(rows.numel()) + " elements");
  require(first_row >= 0, "first_row", "0 or more", std::to_string(first_row));
  const int64_t* words = tokens.data<int64_t>();
  for (int64_t i = 0; vocabulary && i < tokens.numel(); ++i)
    require(words[i] >= 0 && words[i] < *vocabulary, "tokens", "words from 0 to " + std::to_string(*vocabulary - 1),
            std::to_string(words[i]) + " at " + std::to_string(i));
  return {words, tokens.numel(), first_row, table.size(0), table.size(1)};
}

void bind_embedding(py::handle tokens_object, py::handle table_object, py::handle out_object, int64_t first_row,
                    std::optional<int64_t> vocabulary) {
  TensorView tokens("tokens", tokens_object), table("table", table_object), out("out", out_object);
  const EmbeddingArgs args = embedding_args(tokens, table, out, first_row, vocabulary);
  out.same_dtype(table).disjoint({&tokens, &table});
  unlocked([&] { kernels().embedding(args, table.data(), out.data(), out.dtype()); });
}

void bind_embedding_backward(py::handle tokens_object, py::handle dout_object, py::handle dtable_object,
                             int64_t first_row) {
  TensorView tokens("tokens", tokens_object), dout("dout", dout_object), dtable("dtable", dtable_object);
  const EmbeddingArgs args = embedding_args(tokens, dtable, dout, first_row, std::nullopt);
  dtable.dtype({DType::f32}).disjoint({&tokens, &dout});
  unlocked([&] { kernels().embedding_backward(args, dout.data(), dout.dtype(), dtable.data<float>()); });
}

void check_positions(const TensorView& x, const TensorView& table) {
  x.floating().rank(3).contiguous();
  table.rank(2).contiguous();
  if (table.size(0) < x.size(0) || table.size(1) != x.size(2))
    table.fail("at least " + std::to_string(x.size(0)) + " rows of " + std::to_string(x.size(2)),
               std::to_string(table.size(0)) + " rows of " + std::to_string(table.size(1)));
}

void bind_add_position(py::handle x_object, py::handle table_object, py::handle out_object) {
  TensorView x("x", x_object), table("table", table_object), out("out", out_object);
  check_positions(x, table);
  table.same_dtype(x);
  out.same_dtype(x).same_shape(x).contiguous().same_or_disjoint({&x}).disjoint({&table});
  unlocked(
      [&] { kernels().add_position(x.data(), table.data(), out.data(), x.dtype(), x.size(0), x.size(1), x.size(2)); });
}

void bind_add_position_backward(py::handle dout_object, py::handle dtable_object) {
  TensorView dout("dout", dout_object), dtable("dtable", dtable_object);
  check_positions(dout, dtable);
  dtable.dtype({DType::f32}).disjoint({&dout});
  unlocked([&] {
    kernels().add_position_backward(dout.data(), dout.dtype(), dtable.data<float>(), dout.size(0), dout.size(1),
                                    dout.size(2));
  });
}

const char GELU_DOC[] = R"(y = gelu(x + bias) in the tanh approximation.

x, y: (..., h) float32, bfloat16 or float16, contiguous; y may be x. bias: (h) in x's dtype, or None.)";

const char GELU_BACKWARD_DOC[] =
    R"(dx = dy gelu'(x + bias), dbias (float32, (h)) += its sum over rows; dx may be dy or x.

bias and dbias are both tensors or both None. The sum has the same bits for any number of threads.)";

const char SUM_ROWS_DOC[] =
    R"(out = scale * (x[0] + x[1] + ...), added in float32 in this order: a reduction over ranks.

x: (count, n), rows contiguous, float32, bfloat16 or float16; out: (n) in any of them.)";

const char EMBEDDING_DOC[] = R"(out = table[tokens - first_row], zeros for tokens of other ranks' rows.

tokens: int64, any shape; table: (rows, h); out: (..., h) with a row per token, table's dtype. vocabulary: size of the whole table;
when given, a token outside is a ValueError.)";

}  // namespace

FM_BIND(pointwise) {
  using namespace py::literals;
  module.def("gelu", &bind_gelu, "x"_a, "bias"_a, "y"_a, GELU_DOC);
  module.def("gelu_backward", &bind_gelu_backward, "dy"_a, "x"_a, "bias"_a, "dx"_a, "dbias"_a, GELU_BACKWARD_DOC);
  module.def("column_sum", &bind_column_sum, "x"_a, "sum"_a,
             "sum (float32, (h)) += sum of x (..., h) over rows; the same bits for any number of threads.");
  module.def("add", &bind_add, "x"_a, "y"_a, "out"_a,
             "out = x + y, one shape and dtype, contiguous; out may be either.");
  module.def("axpy", &bind_axpy, "alpha"_a, "x"_a, "y"_a,
             "y += alpha x, contiguous, each float32, bfloat16 or float16.");
  module.def("sum_rows", &bind_sum_rows, "x"_a, "out"_a, "scale"_a = 1.0, SUM_ROWS_DOC);
  module.def("embedding", &bind_embedding, "tokens"_a, "table"_a, "out"_a, "first_row"_a = 0,
             "vocabulary"_a = py::none(), EMBEDDING_DOC);
  module.def("embedding_backward", &bind_embedding_backward, "tokens"_a, "dout"_a, "dtable"_a, "first_row"_a = 0,
             "dtable (float32) [tokens - first_row] += dout, the tokens in order; the same bits for any number of "
             "threads.");
  module.def("add_position", &bind_add_position, "x"_a, "table"_a, "out"_a,
             "out (s, b, h) = x + table[:s]; x, table and out have one dtype, out may be x.");
  module.def("add_position_backward", &bind_add_position_backward, "dout"_a, "dtable"_a,
             "dtable (float32) [:s] += sum of dout (s, b, h) over b.");
}

}  // namespace fm
