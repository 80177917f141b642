// Python functions of gemm.h: gemm, linear_forward, linear_data_gradient, linear_weight_gradient, pack_weight,
// packed_weight_size. Legend: M rows (tokens), N output features, K input features; a weight is (N, K).
#include <cstring>

#include "extension/tensor_view.h"
#include "tuning.h"

namespace fm {
namespace {

constexpr int64_t ALIGNMENT = tuning::Baseline::CACHE_LINE;

// The first bytes of a packed weight: what it holds and for which target, because the layout is that target's own.
struct PackedHeader {
  char magic[8], target[24];
  int64_t rows, cols, data_offset;
  DType dtype;
  int32_t transposed, fp16_chunk;
};
constexpr char MAGIC[8] = "FMGEMM2";
static_assert(sizeof(PackedHeader) <= ALIGNMENT, "the header fits before the data");

// The product's n and k for a weight (rows, cols): the forward product sums over cols, the data gradient over rows.
int64_t packed_bytes(int64_t rows, int64_t cols, DType dtype, bool transposed, int64_t fp16_chunk) {
  return 2 * ALIGNMENT + kernels().packed_weight_size(transposed ? cols : rows,
                                                      transposed ? rows : cols, dtype, fp16_chunk);
}

// The chunk of FP16 sums for operands of this type, or an error: 0 is always good.
int64_t checked_chunk(int64_t chunk, DType dtype) {
  constexpr int64_t MOST = 1 << 16;
  const std::string got = ", got " + std::to_string(chunk);
  if (chunk < 0 || chunk > MOST)
    throw py::value_error("fp16_chunk: expected 0 to " + std::to_string(MOST) + got);
  if (chunk && dtype != DType::f16)
    throw py::value_error("fp16_chunk: expected 0 for operands of " +
                          std::string(dtype_name(dtype)) + got);
  if (chunk && !kernels().has_fp16_arithmetic())
    throw py::value_error("fp16_chunk: expected 0 for target " + std::string(active()) +
                          ", which has no FP16 arithmetic" + got);
  return chunk;
}

// How operands of this type are multiplied, `k` products to a sum: as they are, with bf16x3 in bfloat16 parts, with int8 quantized.
DType factors(DType dtype, bool bf16x3, bool int8, int64_t k) {
  if (int8) {
    require(!bf16x3, "int8", "False with bf16x3", "True");
    require(k <= INT8_MOST_K, "int8",
            "at most " + std::to_string(INT8_MOST_K) + " products in a sum", std::to_string(k));
    return dtype == DType::f32    ? DType::int8_of_f32
           : dtype == DType::bf16 ? DType::int8_of_bf16
                                  : DType::int8_of_f16;
  }
  if (!bf16x3) return dtype;
  if (dtype != DType::f32)
    throw py::value_error("bf16x3: expected False for operands of " +
                          std::string(dtype_name(dtype)) + ", got True");
  if (!kernels().has_bf16_arithmetic())
    throw py::value_error("bf16x3: expected False for target " + std::string(active()) +
                          ", which has no BF16 arithmetic, got True");
  return DType::bf16x3;
}

// Whether the elements of A are rounded at random: only those of INT8.
bool rounds_at_random(bool stochastic, bool int8) {
  if (stochastic) require(int8, "stochastic", "False without int8", "True");
  return stochastic;
}

std::string describe(const char* target, int64_t rows, int64_t cols, DType dtype, bool transposed,
                     int64_t fp16_chunk) {
  return std::string(dtype_name(dtype)) + " (" + std::to_string(rows) + ", " +
         std::to_string(cols) + ") packed with transposed=" + (transposed ? "True" : "False") +
         ", fp16_chunk=" + std::to_string(fp16_chunk) + " by target " + target;
}

// An empty tensor of a dtype.
TensorView empty_of(py::handle dtype) {
  return TensorView("dtype",
                    py::module_::import("torch").attr("empty")(0, py::arg("dtype") = dtype));
}

// A tensor of the dtype that a weight is multiplied with: by default the weight's.
TensorView activations_like(const TensorView& weight, py::handle dtype) {
  if (dtype.is_none()) return weight.floating();
  return empty_of(dtype).floating();
}

void pack_weight(py::handle weight_object, py::handle packed_object, bool transposed,
                 int64_t fp16_chunk, bool bf16x3, bool int8, py::handle scales_object,
                 py::handle dtype_object) {
  TensorView weight("weight", weight_object), packed("packed", packed_object);
  weight.rank(2).last_contiguous();
  const TensorView like = activations_like(weight, dtype_object);
  const Q8Scales scales = q8_scales(scales_object, weight, like, packed);
  checked_chunk(fp16_chunk, like.dtype());
  const DType type = factors(like.dtype(), bf16x3, int8, weight.size(transposed ? 0 : 1));
  packed.dtype({DType::u8})
      .shape({packed_bytes(weight.size(0), weight.size(1), type, transposed, fp16_chunk)})
      .contiguous();
  packed.disjoint({&weight});
  PackedHeader header = {};
  std::memcpy(header.magic, MAGIC, sizeof MAGIC);
  std::strncpy(header.target, active(), sizeof header.target - 1);
  header.rows = weight.size(0), header.cols = weight.size(1), header.dtype = type,
  header.transposed = transposed, header.fp16_chunk = static_cast<int32_t>(fp16_chunk);
  char* base = packed.data<char>();
  const uintptr_t first = reinterpret_cast<uintptr_t>(base) + sizeof header;
  header.data_offset = static_cast<int64_t>((first + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT -
                                            reinterpret_cast<uintptr_t>(base));
  std::memcpy(base, &header, sizeof header);
  const int64_t row = weight.stride(0);
  void* data = base + header.data_offset;
  GemmPackArgs args = {weight.size(0), weight.size(1), type,  weight.data(), 1, row,
                       data,           fp16_chunk,     scales};
  if (transposed) std::swap(args.n, args.k), std::swap(args.b_row, args.b_col);
  unlocked([&] { kernels().pack_weight(args); });
}

const void* packed_data(py::handle object, const TensorView& weight, DType type, bool transposed,
                        int64_t fp16_chunk, const TensorView& out) {
  if (object.is_none()) return nullptr;
  TensorView packed("packed", object);
  packed.dtype({DType::u8}).contiguous().disjoint({&out});
  PackedHeader header = {};
  if (packed.numel() >= int64_t(sizeof header)) std::memcpy(&header, packed.data(), sizeof header);
  if (std::memcmp(header.magic, MAGIC, sizeof MAGIC))
    packed.fail("the output of pack_weight", "other bytes");
  const bool fits = header.rows == weight.size(0) && header.cols == weight.size(1) &&
                    header.dtype == type && bool(header.transposed) == transposed &&
                    header.fp16_chunk == fp16_chunk && !std::strcmp(header.target, active());
  if (!fits) {
    packed.fail("a weight " + describe(active(), weight.size(0), weight.size(1), type, transposed,
                                       fp16_chunk),
                describe(header.target, header.rows, header.cols, header.dtype, header.transposed,
                         header.fp16_chunk));
  }
  return packed.data<char>() + header.data_offset;
}

// A matrix of the epilogue: C's shape and type, rows contiguous, apart from C, or where that is allowed C itself.
void* epilogue_matrix(const char* name, py::handle object, const TensorView& out, int64_t& row,
                      bool may_be_out = false) {
  if (object.is_none()) return nullptr;
  TensorView view(name, object);
  view.same_dtype(out).same_shape(out).last_contiguous();
  may_be_out ? view.same_or_disjoint({&out}) : view.disjoint({&out});
  row = view.stride(0);
  return view.data();
}

// The scales of a Q8 weight.
Q8Scales check_operands(const TensorView& x, const TensorView& weight, py::handle scales_object,
                        const TensorView& out, int64_t inputs, int64_t outputs) {
  weight.rank(2).last_contiguous();
  if (scales_object.is_none()) weight.floating();
  x.rank(2).floating().shape({-1, inputs}).last_contiguous();
  const Q8Scales scales = q8_scales(scales_object, weight, x, out);
  out.rank(2).shape({x.size(0), outputs}).last_contiguous().disjoint({&x, &weight});
  if (out.dtype() != x.dtype()) out.dtype({x.dtype(), DType::f32});
  distinct_rows(out);
  return scales;
}

void run(const GemmArgs& args) {
  unlocked([&] { kernels().gemm(args); });
}

void linear_forward(py::handle x_object, py::handle weight_object, py::handle out_object,
                    py::handle bias_object, const std::optional<std::string>& activation,
                    py::handle pre_object, py::handle residual_object, py::handle packed_object,
                    int64_t fp16_chunk, bool bf16x3, bool int8, py::handle scales_object) {
  TensorView x("x", x_object), weight("weight", weight_object), out("out", out_object);
  weight.rank(2);
  GemmArgs args = {};
  args.b_scales = check_operands(x, weight, scales_object, out, weight.size(1), weight.size(0));
  args.m = x.size(0), args.n = weight.size(0), args.k = weight.size(1);
  args.in_dtype = factors(x.dtype(), bf16x3, int8, args.k), args.out_dtype = out.dtype(),
  args.fp16_chunk = checked_chunk(fp16_chunk, x.dtype());
  args.a = x.data(), args.a_row = x.stride(0), args.a_col = 1;
  args.b = weight.data(), args.b_row = 1, args.b_col = weight.stride(0);
  args.packed = packed_data(packed_object, weight, args.in_dtype, false, fp16_chunk, out);
  args.c = out.data(), args.c_row = out.stride(0);
  if (!bias_object.is_none()) {
    TensorView bias("bias", bias_object);
    bias.same_dtype(out).shape({weight.size(0)}).contiguous().disjoint({&out});
    args.bias = bias.data();
  }
  args.activation = mlp_activation(activation);
  args.pre = epilogue_matrix("pre", pre_object, out, args.pre_row);
  if (args.pre) {
    TensorView pre("pre", pre_object);
    pre.disjoint({&x, &weight});
    distinct_rows(pre);
  }
  args.residual = epilogue_matrix("residual", residual_object, out, args.residual_row);
  run(args);
}

void linear_data_gradient(py::handle grad_object, py::handle weight_object, py::handle out_object,
                          py::handle activation_input_object, const std::string& activation,
                          py::handle packed_object, int64_t fp16_chunk, bool bf16x3, bool int8,
                          py::handle scales_object, bool stochastic) {
  TensorView grad("grad_output", grad_object), weight("weight", weight_object),
      out("out", out_object);
  weight.rank(2);
  GemmArgs args = {};
  args.b_scales = check_operands(grad, weight, scales_object, out, weight.size(0), weight.size(1));
  args.m = grad.size(0), args.n = weight.size(1), args.k = weight.size(0);
  args.in_dtype = factors(grad.dtype(), bf16x3, int8, args.k), args.out_dtype = out.dtype();
  args.fp16_chunk = checked_chunk(fp16_chunk, grad.dtype());
  args.random_rounding = rounds_at_random(stochastic, int8);
  args.a = grad.data(), args.a_row = grad.stride(0), args.a_col = 1;
  args.b = weight.data(), args.b_row = weight.stride(0), args.b_col = 1;
  args.packed = packed_data(packed_object, weight, args.in_dtype, true, fp16_chunk, out);
  args.c = out.data(), args.c_row = out.stride(0);
  args.activation_input = epilogue_matrix("activation_input", activation_input_object, out,
                                          args.activation_input_row, true);
  if (args.activation_input) args.activation = mlp_activation(activation);
  run(args);
}

void linear_weight_gradient(py::handle grad_object, py::handle x_object,
                            py::handle weight_gradient_object, py::handle bias_gradient_object,
                            int64_t fp16_chunk, bool bf16x3, bool int8, bool stochastic,
                            bool overwrite) {
  TensorView grad("grad_output", grad_object), x("x", x_object),
      out("weight_gradient", weight_gradient_object);
  grad.rank(2).floating().last_contiguous();
  x.rank(2).shape({grad.size(0), -1}).same_dtype(grad).last_contiguous();
  out.dtype({DType::f32}).shape({grad.size(1), x.size(1)}).last_contiguous().disjoint({&grad, &x});
  distinct_rows(out);
  GemmArgs args = {};
  args.m = grad.size(1), args.n = x.size(1), args.k = grad.size(0);
  args.in_dtype = factors(grad.dtype(), bf16x3, int8, args.k), args.out_dtype = DType::f32,
  args.accumulate = true, args.overwrite = overwrite;
  args.fp16_chunk = checked_chunk(fp16_chunk, grad.dtype());
  args.random_rounding = rounds_at_random(stochastic, int8);
  args.a = grad.data(), args.a_row = 1, args.a_col = grad.stride(0);
  args.b = x.data(), args.b_row = x.stride(0), args.b_col = 1;
  args.c = out.data(), args.c_row = out.stride(0);
  if (!bias_gradient_object.is_none()) {
    TensorView bias("bias_gradient", bias_gradient_object);
    bias.dtype({DType::f32}).shape({grad.size(1)}).contiguous().disjoint({&grad, &x, &out});
    args.a_sums = bias.data<float>();
  }
  run(args);
}

// The rows of each group: none below 0, and `rows` of them in all.
const int64_t* group_counts(py::handle object, int64_t groups, int64_t rows) {
  TensorView counts("counts", object);
  counts.dtype({DType::i64}).shape({groups}).contiguous();
  int64_t total = 0;
  for (int64_t i = 0; i < groups; ++i) {
    const int64_t count = counts.data<int64_t>()[i];
    if (count < 0 || count > rows)
      counts.fail("numbers from 0 to " + std::to_string(rows), std::to_string(count));
    total += count;
  }
  if (total != rows) counts.fail("a sum of " + std::to_string(rows), std::to_string(total));
  return counts.data<int64_t>();
}

void run_grouped(const GroupedGemmArgs& args) {
  unlocked([&] { kernels().grouped_linear_forward(args); });
}

// out = x W^T of each group, or x W with `transposed`.
void grouped_linear(const TensorView& x, py::handle weight_object, py::handle counts_object,
                    py::handle out_object, bool transposed, int64_t fp16_chunk, bool int8,
                    py::handle scales_object, bool stochastic = false) {
  TensorView weight("weight", weight_object), out("out", out_object);
  weight.rank(3).contiguous();
  const int64_t inputs = weight.size(transposed ? 1 : 2), outputs = weight.size(transposed ? 2 : 1);
  x.rank(2).floating().shape({-1, inputs}).last_contiguous();
  out.rank(2).shape({x.size(0), outputs}).same_dtype(x).last_contiguous().disjoint({&x, &weight});
  distinct_rows(out);
  GemmArgs each = {};
  each.n = outputs, each.k = inputs;
  each.in_dtype = factors(x.dtype(), false, int8, each.k), each.out_dtype = x.dtype(),
  each.fp16_chunk = checked_chunk(fp16_chunk, x.dtype());
  each.random_rounding = rounds_at_random(stochastic, int8);
  each.a = x.data(), each.a_row = x.stride(0), each.a_col = 1;
  each.b = weight.data(), (transposed ? each.b_row : each.b_col) = weight.size(2),
  (transposed ? each.b_col : each.b_row) = 1;
  each.c = out.data(), each.c_row = out.stride(0);
  each.b_scales = q8_scales(scales_object, weight, x, out);
  run_grouped({each, weight.size(0), group_counts(counts_object, weight.size(0), x.size(0)),
               inputs * outputs, false, weight.size(1) * q8_blocks(weight.size(2))});
}

void grouped_linear_forward(py::handle x_object, py::handle weight_object, py::handle counts_object,
                            py::handle out_object, int64_t fp16_chunk, bool int8,
                            py::handle scales_object) {
  grouped_linear(TensorView("x", x_object), weight_object, counts_object, out_object, false,
                 fp16_chunk, int8, scales_object);
}

void grouped_linear_data_gradient(py::handle grad_object, py::handle weight_object,
                                  py::handle counts_object, py::handle out_object,
                                  int64_t fp16_chunk, bool int8, py::handle scales_object,
                                  bool stochastic) {
  grouped_linear(TensorView("grad_output", grad_object), weight_object, counts_object, out_object,
                 true, fp16_chunk, int8, scales_object, stochastic);
}

void grouped_linear_weight_gradient(py::handle grad_object, py::handle x_object,
                                    py::handle counts_object, py::handle weight_gradient_object,
                                    int64_t fp16_chunk, bool int8, bool stochastic,
                                    bool overwrite) {
  TensorView grad("grad_output", grad_object), x("x", x_object),
      out("weight_gradient", weight_gradient_object);
  grad.rank(2).floating().last_contiguous();
  x.rank(2).shape({grad.size(0), -1}).same_dtype(grad).last_contiguous();
  out.dtype({DType::f32}).shape({-1, grad.size(1), x.size(1)}).contiguous().disjoint({&grad, &x});
  GemmArgs each = {};
  each.m = grad.size(1), each.n = x.size(1);
  each.in_dtype = factors(grad.dtype(), false, int8, grad.size(0)), each.out_dtype = DType::f32,
  each.accumulate = true, each.overwrite = overwrite;
  each.fp16_chunk = checked_chunk(fp16_chunk, grad.dtype());
  each.random_rounding = rounds_at_random(stochastic, int8);
  each.a = grad.data(), each.a_row = 1, each.a_col = grad.stride(0);
  each.b = x.data(), each.b_row = x.stride(0), each.b_col = 1;
  each.c = out.data(), each.c_row = each.n;
  run_grouped({each, out.size(0), group_counts(counts_object, out.size(0), grad.size(0)),
               each.m * each.n, true});
}

// One of the two strides of a factor is 1.
void either_contiguous(const TensorView& t) {
  if (t.numel() && t.stride(0) != 1 && t.stride(1) != 1) {
    t.fail("contiguous rows or columns",
           "strides (" + std::to_string(t.stride(0)) + ", " + std::to_string(t.stride(1)) + ")");
  }
}

void plain_gemm(py::handle a_object, py::handle b_object, py::handle out_object, bool accumulate,
                int64_t fp16_chunk, bool bf16x3, bool int8, bool stochastic) {
  TensorView a("a", a_object), b("b", b_object), out("out", out_object);
  a.rank(2).floating();
  b.rank(2).shape({a.size(1), -1}).same_dtype(a);
  either_contiguous(a);
  either_contiguous(b);
  out.shape({a.size(0), b.size(1)}).last_contiguous().disjoint({&a, &b});
  if (accumulate || out.dtype() != a.dtype()) out.dtype({DType::f32});
  distinct_rows(out);
  GemmArgs args = {};
  args.m = a.size(0), args.n = b.size(1), args.k = a.size(1);
  args.in_dtype = factors(a.dtype(), bf16x3, int8, args.k), args.out_dtype = out.dtype(),
  args.accumulate = accumulate;
  args.random_rounding = rounds_at_random(stochastic, int8);
  args.fp16_chunk = checked_chunk(fp16_chunk, a.dtype());
  // A single row or column has an arbitrary stride; the other one is then 1.
  const bool a_rows = a.stride(1) == 1 || a.size(1) <= 1,
             b_rows = b.stride(1) == 1 || b.size(1) <= 1;
  args.a = a.data(), args.a_row = a_rows ? a.stride(0) : 1, args.a_col = a_rows ? 1 : a.stride(1);
  args.b = b.data(), args.b_row = b_rows ? b.stride(0) : 1, args.b_col = b_rows ? 1 : b.stride(1);
  args.c = out.data(), args.c_row = out.stride(0);
  run(args);
}

}  // namespace

FM_BIND(gemm) {
  using namespace py::literals;
  const py::object none = py::none();
  module.def(
      "packed_weight_size",
      [](int64_t rows, int64_t cols, py::handle dtype, bool transposed, int64_t fp16_chunk,
         bool bf16x3, bool int8) {
        if (rows < 0 || cols < 0)
          throw py::value_error("shape: expected sizes of 0 or more, got (" + std::to_string(rows) +
                                ", " + std::to_string(cols) + ")");
        const DType type = empty_of(dtype).floating().dtype();
        return packed_bytes(rows, cols, factors(type, bf16x3, int8, transposed ? rows : cols),
                            transposed, checked_chunk(fp16_chunk, type));
      },
      "rows"_a, "cols"_a, "dtype"_a, "transposed"_a = false, "fp16_chunk"_a = 0, "bf16x3"_a = false,
      "int8"_a = false,
      "Bytes that pack_weight needs for a (rows, cols) weight of this torch dtype and the target "
      "in use.");
  module.def("pack_weight", &pack_weight, "weight"_a, "packed"_a, "transposed"_a = false,
             "fp16_chunk"_a = 0, "bf16x3"_a = false, "int8"_a = false, "scales"_a = none,
             "dtype"_a = none,
             "Packs weight (N, K), rows contiguous, into `packed`, a uint8 tensor of "
             "packed_weight_size bytes, for "
             "linear_forward or,\n"
             "with transposed, for linear_data_gradient. Valid for the target in use, this "
             "fp16_chunk and this bf16x3 only, until the "
             "weight changes. scales: of an int8 weight (quantize_q8), packed for activations of "
             "this dtype.");
  module.def(
      "gemm", &plain_gemm, "a"_a, "b"_a, "out"_a, "accumulate"_a = false, "fp16_chunk"_a = 0,
      "bf16x3"_a = false, "int8"_a = false, "stochastic"_a = false,
      "out (M, N) = a (M, K) b (K, N), or += with accumulate and a float32 out. a and b have one "
      "floating "
      "dtype, out that dtype\n"
      "or float32. The rows or the columns of a and of b are contiguous: a transposed view costs "
      "nothing.\n"
      "fp16_chunk: of float16 operands and where has_fp16_arithmetic(), sums that many consecutive "
      "products in FP16 "
      "before\n"
      "they are added in float32; 0, the default, sums in float32 alone. bf16x3: of float32 "
      "operands and where "
      "has_bf16_arithmetic(),\n"
      "multiplies each operand as three bfloat16 parts, about as exactly. int8: quantizes rows of "
      "a "
      "and columns of b to eight\n"
      "bits each, K up to 131072. stochastic: rounds those of a up or down at random, so that the "
      "mean is right. See docs/numerics.md.");
  module.def("linear_forward", &linear_forward, "x"_a, "weight"_a, "out"_a, "bias"_a = none,
             "activation"_a = none, "pre"_a = none, "residual"_a = none, "packed"_a = none,
             "fp16_chunk"_a = 0, "bf16x3"_a = false, "int8"_a = false, "scales"_a = none,
             "out (M, N) = f(x (M, K) weight (N, K)^T + bias (N,)) + residual (M, N). activation: "
             "f as in activate, or None. pre "
             "(M, N) receives\n"
             "the argument of f. x and weight have one floating dtype; out that dtype or float32; "
             "bias, pre and "
             "residual out's.\n"
             "Rows may be strided. packed: the weight from pack_weight. fp16_chunk and bf16x3 as "
             "in gemm. scales: of an int8 weight\n"
             "(quantize_q8), for the bits of the same call with dequantize_q8's weight in x's "
             "dtype.");
  module.def("linear_data_gradient", &linear_data_gradient, "grad_output"_a, "weight"_a, "out"_a,
             "activation_input"_a = none, "activation"_a = "gelu", "packed"_a = none,
             "fp16_chunk"_a = 0, "bf16x3"_a = false, "int8"_a = false, "scales"_a = none,
             "stochastic"_a = false,
             "out (M, K) = grad_output (M, N) weight (N, K), times f'(activation_input (M, K)) "
             "where it is passed, which may be "
             "out. activation: f as in activate. dtypes and strides as in\n"
             "linear_forward. packed: the weight from pack_weight(transposed=True). fp16_chunk and "
             "bf16x3 and stochastic as in gemm, scales as in linear_forward.");
  module.def(
      "linear_weight_gradient", &linear_weight_gradient, "grad_output"_a, "x"_a,
      "weight_gradient"_a, "bias_gradient"_a = none, "fp16_chunk"_a = 0, "bf16x3"_a = false,
      "int8"_a = false, "stochastic"_a = false, "overwrite"_a = false,
      "weight_gradient (N, K) += grad_output (M, N)^T x (M, K) and bias_gradient (N,) += column\n"
      "sums of grad_output, both float32. grad_output and x have one floating dtype; rows may be\n"
      "strided. fp16_chunk and bf16x3 as in gemm, for the matmul. overwrite: weight_gradient\n"
      "counts as zeros and is not read; the bits are the same.");
  module.def("grouped_linear_forward", &grouped_linear_forward, "x"_a, "weight"_a, "counts"_a,
             "out"_a, "fp16_chunk"_a = 0, "int8"_a = false, "scales"_a = none,
             "out (M, N) = x (M, K) weight[i]^T for each group i of consecutive rows, counts[i] of "
             "them, which may be 0. weight "
             "(groups, N, K) and\n"
             "out have the floating dtype of x; counts (groups) is int64, on the CPU. fp16_chunk "
             "as in gemm, scales (groups, N, ceil(K / 64)) as in linear_forward.");
  module.def("grouped_linear_data_gradient", &grouped_linear_data_gradient, "grad_output"_a,
             "weight"_a, "counts"_a, "out"_a, "fp16_chunk"_a = 0, "int8"_a = false,
             "scales"_a = none, "stochastic"_a = false,
             "out (M, K) = grad_output (M, N) weight[i] for each group of rows. Otherwise as "
             "grouped_linear_forward.");
  module.def("grouped_linear_weight_gradient", &grouped_linear_weight_gradient, "grad_output"_a,
             "x"_a, "counts"_a, "weight_gradient"_a, "fp16_chunk"_a = 0, "int8"_a = false,
             "stochastic"_a = false, "overwrite"_a = false,
             "weight_gradient[i] (N, K) += grad_output^T x over the rows of group i, in float32.\n"
             "A group without rows stays as it is, or is zeros with overwrite, which is as in\n"
             "linear_weight_gradient. grad_output (M, N) and x (M, K) have one floating dtype.\n"
             "Otherwise as grouped_linear_forward.");
  module.def(
      "has_fp16_arithmetic", [] { return kernels().has_fp16_arithmetic(); },
      "Whether the target in use can sum in FP16 (fp16_chunk of gemm). The portable target and the "
      "reference do it "
      "slowly.");
  module.def(
      "has_bf16_arithmetic", [] { return kernels().has_bf16_arithmetic(); },
      "Whether the target in use multiplies bfloat16 pairs or matrices (bf16x3 of gemm). The "
      "reference takes it for float32.");
}

}  // namespace fm
