// What every part of the extension shares: element types, argument structs, and the table of kernels made from
// kernels.inc. Leaves out: anything with an instruction set in it (simd.h) and anything of Python (tensor_view.h).
#pragma once
#include <cstdint>

namespace fm {

// Of the operands of a matmul alone: bf16x3, float32 that is multiplied as three bfloat16 (gemm_split.h); int8_of_*, numbers of
// that type that are quantized to eight bits (gemm_int8.h).
enum class DType : int32_t {
  f32,
  f64,
  bf16,
  f16,
  i32,
  i64,
  u8,
  b8,
  i8,
  bf16x3,
  int8_of_f32,
  int8_of_bf16,
  int8_of_f16
};

inline bool is_int8(DType operands) { return operands >= DType::int8_of_f32; }

// The type of a matmul's operands in memory.
inline DType stored_dtype(DType operands) {
  switch (operands) {
    case DType::bf16x3:
    case DType::int8_of_f32:
      return DType::f32;
    case DType::int8_of_bf16:
      return DType::bf16;
    case DType::int8_of_f16:
      return DType::f16;
    default:
      return operands;
  }
}

// Storage of the 16-bit formats. No compiler type: GCC 12 has no _Float16 in C++ on aarch64.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// elementwise.h
enum class Function : int32_t { exp, log, sqrt, rsqrt, reciprocal };

// activation.h and gate.h: what stands between the matmuls of an MLP. A gate has silu or gelu, the others have no gate.
enum class Activation : int32_t { none, gelu, gelu_exact, squared_relu, silu };

// What the random words of a dropout mask depend on, beside the element's place: philox_layout.h says which word an element
// gets. first_sample, row0, col0: the global place of this tensor's first element.
struct DropoutKey {
  uint64_t seed, stream;
  int64_t first_sample, row0, col0;
};

// philox.h: dropout on a contiguous (outer, samples, inner, cols) view.
struct DropoutArgs {
  int64_t outer, samples, inner, cols;
  float p;
  DropoutKey key;
};

// philox.h: a slice of rows x cols at (row0, col0) of a global matrix.
struct NormalArgs {
  int64_t rows, cols, row0, col0;
  uint64_t seed, stream;
  float std, mean;
};

// Of attention without a window: more than there are positions.
constexpr int64_t NO_WINDOW = INT64_C(1) << 31;

// Positions [begin, end) of a sequence.
struct Positions {
  int64_t begin = 0, end = 0;
};

// attention.h: causal self-attention of query heads over sequences of s positions, heads / groups of them to a key and a value;
// queries and keys have key_size columns, values and the output value_size. Scores are divided by score_divisor, usually
// sqrt(key_size); query i sees the keys i - window < j <= i. p = 0 for no dropout, whose DropoutKey of the probabilities
// (b, heads, s, s) has row0 = first_head * s. starts (b, s): the position at which the document of each position begins;
// query i sees no key before starts[i]. Null: every sample is one document. attention_part_*: a call has the queries and
// keys at these positions alone; both are empty where it has all s.
struct AttentionArgs {
  int64_t s, b, heads, groups, key_size, value_size, window;
  float score_divisor, p;
  uint64_t seed, stream;
  int64_t first_sample, first_head;
  const int32_t* starts = nullptr;
  Positions queries = {}, keys = {};
  bool part() const { return queries.end > 0; }
};

// attention_decode.h: one token of each of `rows` samples, heads / groups query heads to a key and a value, against caches of
// `slots` positions. Row r is position positions[r] of the sample at place samples[r] of the caches. shared: a value is the
// beginning of its key, in the same memory.
struct DecodeArgs {
  int64_t rows, heads, groups, key_size, value_size, slots;
  bool shared;
  float score_divisor;
  const int64_t *samples, *positions;
  // Columns of a group in a row of qkv, and from a value to the next in the cache.
  int64_t group_columns() const {
    return (heads / groups + 1) * key_size + (shared ? 0 : value_size);
  }
  int64_t value_row() const { return shared ? key_size : value_size; }
};

// adamw_rounding.h: the key, and which element of the global tensor each of a call's elements is. Element i has the number offset +
// (first + i) / columns * row + (first + i) % columns. Without values: offset + i.
struct RoundingArgs {
  uint32_t k0 = 0, k1 = 0;
  int64_t offset = 0, first = 0, columns = INT64_C(1) << 62, row = 0;
};

// adamw.h: the scalars of one AdamW step, made in double from the options by adamw_bind.cc. rounding: of exp_avg_sq in BF16.
struct AdamWArgs {
  float grad_scale, decay, one_minus_beta1, beta2, one_minus_beta2, step_size,
      inverse_sqrt_correction, eps;
  RoundingArgs rounding = {};
};

// A moment of AdamW: n float32 or bfloat16 elements.
struct Moment {
  void* data;
  DType dtype;
};

// Layer norm of contiguous (rows, cols); weight, bias, x and y have one dtype, mean and rstd are (rows) float32. RMS norm has
// neither bias nor mean, and in backward no dbias: null.
struct LayerNormArgs {
  const void *x, *weight, *bias;
  void* y;
  float *mean, *rstd;
  int64_t rows, cols;
  float eps;
  DType dtype;
};

// Its backward: dx = add + gradient through the norm, dweight and dbias are added to. add may be null.
struct LayerNormGradArgs {
  const void *dy, *add, *x, *weight;
  const float *mean, *rstd;
  void* dx;
  float *dweight, *dbias;
  int64_t rows, cols;
  DType dtype;
};

// out = residual + dropout(x + bias) on (outer, samples, 1, cols); bias may be null.
struct ResidualArgs {
  const void *x, *bias, *residual;
  void* out;
  DType dtype;
  DropoutArgs dropout;
};

// Its backward: dx = dropout(dout), dbias is added to. dx may be null (not wanted, or p = 0: it is dout), so may dbias.
struct ResidualGradArgs {
  const void* dout;
  void* dx;
  float* dbias;
  DType dtype;
  DropoutArgs dropout;
};

// activation.h: y = f(x + bias). Rows of x begin x_row elements apart, those of y are next to each other. bias may be null.
struct ActivationArgs {
  const void *x, *bias;
  void* y;
  int64_t x_row, rows, cols;
  DType dtype;
  Activation activation;
};

// gate.h: x (rows, 2, cols) whose rows and parts, the gate and what it multiplies, lie x_row and x_part elements apart. factors
// (rows): what the result is multiplied by. Null: 1.
struct GateArgs {
  const void* x;
  int64_t x_row, x_part, rows, cols;
  DType dtype;
  Activation activation;
  const float* factors = nullptr;
};

// Its backward: dy (rows, cols) is contiguous, dx (rows, 2, cols) lies as x does, with distances of its own. With factors it also
// makes their gradients, dfactors (rows), and the result y (rows, cols) again, which may be dy.
struct GateGradArgs {
  const void* dy;
  void* dx;
  int64_t dx_row, dx_part;
  float* dfactors = nullptr;
  void* y = nullptr;
};

// routing.h: what makes the scores of a token's experts. A softmax over all experts, or over the chosen ones; sigmoids, which of
// several experts are divided by their sum.
enum class Scores : int32_t { softmax, softmax_of_chosen, sigmoid };

// The k experts of each of `rows` tokens, by logits (rows, experts) and a bias (experts) of the choice, or null; all in the best
// group_topk of `groups` groups of neighbouring experts, or groups = 0. The scores are multiplied by `scaling`.
struct RouteArgs {
  const float *logits, *bias;
  int64_t rows, experts, k, groups, group_topk;
  Scores scores;
  float scaling, normalizer;  // the latter is added to a sum of sigmoids
};

// Rows of `rows` tokens and of n pairs of a token and one of its k experts.
struct PermuteArgs {
  int64_t rows, n, k, cols;
  DType dtype;
};

// rotary.h: x and y (s, b, heads, d), in whose heads `queries` queries, a key and a value follow one another; cos and sin (s, half)
// of the positions. q_weight and k_weight (d) in x's dtype, or null: no norm. inverse: turn by the negative angles. In backward y
// takes the gradient of x. positions (s, b): the row of cos and sin of each token. Null: all tokens of a position have its row.
struct RotaryArgs {
  const void *x, *q_weight, *k_weight;
  const float *cos, *sin;
  void* y;
  int64_t s, b, heads, queries, d, half;
  float eps;
  bool interleaved, inverse;
  DType dtype;
  const int32_t* positions = nullptr;
  int64_t angles_of(int64_t token) const { return positions ? positions[token] : token / b; }
};

// The gradient of the result, and those of the weights (d), which are added to.
struct RotaryGradArgs {
  const void* dy;
  float *dq_weight, *dk_weight;
};

// delta_rule.h: tokens of a chunk, and from one saved state to the next.
constexpr int64_t DELTA_CHUNK = 64, DELTA_SEGMENT = 256;

// qkv (s, b, 2 groups d + heads dv), of each group its query, its key and the values of its heads / groups consecutive heads; decay
// and beta (s, b, heads). starts (b, s): the token at which the document of each token begins, or null.
// states (segments + 1, b, heads, d, dv): before each segment and after the last token.
struct DeltaArgs {
  int64_t s, b, groups, heads, d, dv;
  const void* qkv;
  const float *decay, *beta;
  DType dtype;
  const int32_t* starts = nullptr;
  const float* states = nullptr;
};

// dstate (b, heads, d, dv): the gradient of the last state, which becomes that of the first.
struct DeltaGradArgs {
  const void* dout;
  void* dqkv;
  float *ddecay, *dbeta, *dstate;
};

// convolution.h: x (s, b, cols), tokens x_row elements apart, weight (cols, taps), earlier (taps - 1, b, cols) or null. starts as above;
// the first document includes the earlier inputs.
struct ConvolutionArgs {
  int64_t s, b, cols, taps;
  const void* x;
  int64_t x_row;
  const void *weight, *earlier;
  DType dtype;
  const int32_t* starts = nullptr;
};

// dweight is added to. dearlier may be null.
struct ConvolutionGradArgs {
  const void* dy;
  void *dx, *dearlier;
  float* dweight;
};

// gated_norm.h: x (rows, cols), a row of each of `heads` heads of a token; gate the same, with tokens gate_row elements apart.
struct GatedNormArgs {
  int64_t rows, heads, cols;
  const void *x, *gate;
  int64_t gate_row;
  const void* weight;
  float eps;
  DType dtype;
};

// dx and dgate are contiguous, dweight is added to.
struct GatedNormGradArgs {
  const void* dy;
  void *dx, *dgate;
  float* dweight;
};

// Rows of logits whose column 0 is word first_row of the vocabulary. Each kernel uses the members it needs. z_loss: the loss has
// z_loss (log sum exp)^2 added.
struct CrossEntropyArgs {
  const void* logits;
  DType dtype;
  int64_t rows, cols;
  const int64_t* labels;
  int64_t first_row;
  float *row_max, *sum_exp, *target_logit;
  float z_loss = 0;
};

// Rows first_row to first_row + table_rows of a table of `cols` columns, looked up by n tokens.
struct EmbeddingArgs {
  const int64_t* tokens;
  int64_t n, first_row, table_rows, cols;
};

}  // namespace fm
#include "gemm/gemm_args.h"
namespace fm {

// decode.h: out (m, n) = f(x (m, k) weight (n, k)^T + bias (n)) of one dtype, f the activation; bias may be null. scales: of a Q8
// weight.
struct FewRowsArgs {
  int64_t m, n, k;
  DType dtype;
  const void* x;
  int64_t x_row;
  const void* weight;
  int64_t weight_row;
  const void* bias;
  void* out;
  int64_t out_row;
  Activation activation;
  Q8Scales scales = {};
};

// q8.h: a weight (rows, cols) of `dtype`, rows weight_row elements apart, and its Q8 form: contiguous values (rows, cols) and scales
// (rows, q8_blocks(cols)).
struct Q8Args {
  int64_t rows, cols;
  DType dtype;
  void* weight;
  int64_t weight_row;
  int8_t* values;
  bf16* scales;
};

struct KernelTable {
#define FM_KERNEL(name, family, sizes, result, parameters, operands, flops, bytes) \
  result(*name) parameters;
#include "kernels.inc"
};

// The table of the target in use (dispatch.cc).
const KernelTable& kernels();

}  // namespace fm
